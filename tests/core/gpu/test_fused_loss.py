"""The fused loss on CUDA: gradients against float64, memory, and no synchronization."""

import pytest
import torch
import torch.nn.functional as F

from meshwright.base.config import IGNORE_INDEX
from meshwright.core.kernels.cross_entropy import linear_cross_entropy

pytestmark = pytest.mark.cuda


def inputs(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, width, device="cuda", generator=generator).to(dtype)
    weight = (0.1 * torch.randn(vocab, width, device="cuda", generator=generator)).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    labels[::17] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("vocab", [1000, 50257])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_gradients_are_those_of_float64_up_to_rounding(vocab, cap, dtype, tolerance):
    # the logits, about 3, are rounded to 8 bits: 0.4 % of their size, and so their exponentials by 1 %
    torch.backends.cuda.matmul.allow_tf32 = False
    hidden, weight, labels = inputs(600, 256, vocab, dtype)
    logits = hidden.double() @ weight.double().T
    logits = logits if cap is None else cap * (logits / cap).tanh()
    expected = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
    exact = torch.autograd.grad(expected / 600, (hidden, weight))
    found = linear_cross_entropy(hidden, weight, labels, IGNORE_INDEX, cap, chunk_tokens=256)
    assert abs(found / expected - 1).item() < tolerance
    for one, other in zip(torch.autograd.grad(found / 600, (hidden, weight)), exact, strict=True):
        assert ((one.double() - other.double()).norm() / other.double().norm()).item() < tolerance


def test_neither_forward_nor_backward_synchronizes():
    hidden, weight, labels = inputs(600, 256, 1000, torch.bfloat16)
    linear_cross_entropy(hidden, weight, labels, IGNORE_INDEX).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        (linear_cross_entropy(hidden, weight, labels, IGNORE_INDEX) / 7).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_memory_does_not_grow_with_the_number_of_tokens_times_the_vocabulary():
    hidden, weight, labels = inputs(8192, 128, 32000, torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(hidden, weight, labels, IGNORE_INDEX, chunk_tokens=1024).backward()
    gradients = 32000 * 128 * (4 + 2) + 8192 * 128 * (2 + 2)
    assert torch.cuda.max_memory_allocated() - before < 1024 * 32000 * 2 + gradients + 8 * 2**20
