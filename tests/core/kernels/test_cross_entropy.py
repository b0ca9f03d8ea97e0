"""The fused output projection and cross-entropy: values, gradients, chunks, masks, and what it allocates."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.base.config import IGNORE_INDEX
from meshwright.core.kernels.cross_entropy import CHUNK_BYTES, CHUNK_TOKENS, default_chunk, linear_cross_entropy
from meshwright.core.kernels.triton_runtime import has_triton
from meshwright.planner.workload.trainer_profiles import FUSED_LOSS, LOSS_CHUNK_TOKENS

VOCAB, WIDTH = 37, 16


def inputs(tokens: int = 32, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, tokens // 4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, VOCAB, (4, tokens // 4), generator=generator)
    labels[1, :5] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor, cap: float | None) -> Tensor:
    logits = hidden @ weight.T
    logits = logits if cap is None else cap * (logits / cap).tanh()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("chunk", [None, 5, 16, 31, 32])
def test_equals_cross_entropy_of_the_logits_in_float64(cap, chunk):
    hidden, weight, labels = inputs()
    expected = plain_loss(hidden, weight, labels, cap)
    gradients = torch.autograd.grad(expected / 7, (hidden, weight))
    found = linear_cross_entropy(hidden, weight, labels, IGNORE_INDEX, cap, chunk)
    for one, other in zip(torch.autograd.grad(found / 7, (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, IGNORE_INDEX, cap, chunk), found)


def test_labels_that_are_all_ignored_give_a_loss_and_gradients_of_zero():
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE_INDEX), IGNORE_INDEX)
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_no_tokens_give_a_loss_and_a_weight_gradient_of_zero():
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64), IGNORE_INDEX)
    loss.backward()
    assert loss == 0
    assert not weight.grad.any()


def test_a_label_outside_of_the_vocabulary_gives_a_loss_that_is_not_finite():
    hidden, weight, labels = inputs()
    labels[0, 0] = VOCAB
    assert not linear_cross_entropy(hidden, weight, labels, IGNORE_INDEX).isfinite()


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, labels = inputs()
    linear_cross_entropy(hidden, weight.requires_grad_(False), labels, IGNORE_INDEX).backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_the_weight_gradient_of_many_chunks_in_bfloat16_is_rounded_once():
    hidden, weight, labels = inputs(512, torch.bfloat16)
    whole, chunks = (
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, IGNORE_INDEX, None, chunk), weight)[0]
        for chunk in (512, 8)
    )
    assert (whole != chunks).sum() <= 0.01 * whole.numel()  # the order of float32 sums moves few of them to a neighbour


def test_gradients_in_bfloat16_are_multiplied_by_a_factor_that_is_not_rounded():
    hidden, weight, labels = inputs(dtype=torch.bfloat16)
    whole, third = (
        torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, IGNORE_INDEX) * factor, hidden)[0]
        for factor in (1.0, 1 / 3)
    )
    assert torch.equal(third, (whole.float() * torch.tensor(1 / 3)).bfloat16())


def test_autocast_gives_the_gradient_the_dtype_of_the_parameter():
    hidden, weight, labels = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(hidden, weight, labels, IGNORE_INDEX).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


class LargestTensor(TorchDispatchMode):
    """Records the largest number of bytes that the result of an operator has."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        sizes = (t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor) and not t._is_view())
        self.largest = max([self.largest, *sizes])
        return result


def test_no_tensor_has_the_logits_of_more_than_one_chunk():
    generator = torch.Generator().manual_seed(0)
    tokens, vocab, chunk = 256, 1000, 16
    hidden = torch.randn(tokens, 8, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(vocab, 8, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    with LargestTensor() as mode:
        linear_cross_entropy(hidden, weight, labels, IGNORE_INDEX, chunk_tokens=chunk).backward()
    assert mode.largest <= chunk * 1024 * 4  # the torch function computes one chunk in float32


@pytest.mark.parametrize(("tokens", "vocab"), [(16384, 128256), (32768, 50257), (100, 128256), (1, 7)])
def test_chunks_are_equal_and_within_the_limit(tokens, vocab):
    chunk = default_chunk(tokens, vocab, itemsize=2)
    assert chunk % 256 == 0
    assert (chunk - 256) * vocab * 2 <= CHUNK_BYTES
    assert chunk <= CHUNK_TOKENS
    assert (default_chunk(tokens, vocab, 2, 2**30) - 256) * vocab * 2 <= 2**30
    last = tokens % chunk or chunk
    assert tokens <= chunk or last > chunk / 2


def test_compiled_it_is_one_graph_with_the_same_gradients():
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden.tanh(), weight, labels, IGNORE_INDEX, 3.0) / 7

    hidden, weight, labels = inputs()
    expected = torch.autograd.grad(loss(hidden, weight, labels), (hidden, weight))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        torch.autograd.grad(compiled(hidden, weight, labels), (hidden, weight)), expected, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


INTERPRETED = """
import torch
from meshwright.core.kernels.cross_entropy import Rows
from meshwright.core.kernels.cross_entropy_kernel import launch_scale

for dtype, cap, vocab in [(torch.float32, None, 5000), (torch.float32, 3.0, 70), (torch.bfloat16, None, 70)]:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(8, vocab, generator=generator)).to(dtype)
    labels = torch.tensor([0, vocab - 1, -100, 5, 9, -100, vocab, -1])  # the last two are outside of the vocabulary
    for modes in ([(True, True)], [(True, False)], [(True, False), (False, True)]):
        padded = torch.nn.functional.pad(logits, (0, 3), value=7.0)
        by_triton, by_torch = (Rows(padded.clone(), vocab, labels, *torch.empty(2, 8), -100, cap) for _ in range(2))
        for statistics, gradient in modes:
            by_triton.compute(statistics=statistics, gradient=gradient)
            by_torch.compute_by_torch(statistics=statistics, gradient=gradient)
        for name in ("logits", "log_sums", "targets"):
            torch.testing.assert_close(getattr(by_triton, name), getattr(by_torch, name))

matrix, factor = torch.randn(3, 5000), torch.tensor(1 / 3)
assert torch.equal(launch_scale(matrix, factor, torch.float32), matrix * factor)
"""


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_triton_kernel_equals_its_torch_function_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when triton is imported
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, timeout=120, check=True)


def test_planner_knows_the_chunks():
    assert FUSED_LOSS["loss_chunk_bytes"] == CHUNK_BYTES
    assert LOSS_CHUNK_TOKENS == CHUNK_TOKENS
