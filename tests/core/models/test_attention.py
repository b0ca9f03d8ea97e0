"""Attention by chunks equals attention with a mask of full sequences, and never has such a mask."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from meshwright.core.models.layers import chunked_attention
from meshwright.core.models.layers.attention import CoreAttention
from meshwright.core.telemetry.memory_tracker import MemoryTracker
from meshwright.core.torch_private import FakeTensors, TorchDispatchMode

BATCH, HEADS, KEY_HEADS, SIZE = 3, 4, 2, 8
SCALE, CAP = 0.3, 2.0


def inputs(tokens: int, value_size: int = SIZE, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(HEADS, SIZE), (KEY_HEADS, SIZE), (KEY_HEADS, value_size), (HEADS, value_size)]
    return [torch.randn(BATCH, heads, tokens, size, generator=generator).to(dtype) for heads, size in shapes]


def random_documents(tokens: int, mean: int) -> torch.Tensor:
    starts = torch.rand(BATCH, tokens, generator=torch.Generator().manual_seed(mean)) < 1 / mean
    starts[0] = False
    return starts.long().cumsum(1)


def masked_attention(q, k, v, documents, window, scale, cap):
    """The definition, with a mask of full sequences."""
    queries, keys = q.shape[2], k.shape[2]
    key_positions = torch.arange(keys)
    positions = key_positions[keys - queries :, None]
    visible = (key_positions <= positions) & (key_positions > positions - (window or keys))
    if documents is not None:
        visible = visible & (documents[:, keys - queries :, None] == documents[:, None, :])[:, None]
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if cap is not None:
        scores = cap * (scores / cap).tanh()
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def results(attend, q, k, v, grad, documents):
    """Output, dq, dk and dv."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    out = attend(q, k, v, documents)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


@pytest.mark.parametrize("window", [None, 5, 150])
@pytest.mark.parametrize("mean", [None, 2, 60, 1000], ids="documents of {}".format)
@pytest.mark.parametrize(("cap", "value_size"), [(None, SIZE), (CAP, SIZE), (None, 6)], ids=str)
def test_attention_by_chunks_equals_a_full_mask(window, mean, cap, value_size):
    tokens = 300
    documents = None if mean is None else random_documents(tokens, mean)
    *tensors, grad = inputs(tokens, value_size)
    ours = results(CoreAttention(window, SCALE, cap), *tensors, grad, documents)
    definition = partial(masked_attention, window=window, scale=SCALE, cap=cap)
    for one, other in zip(ours, results(definition, *tensors, grad, documents), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("queries", [1, 7, 200])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (5, None), (150, CAP)])
@pytest.mark.parametrize("packed", [False, True])
def test_queries_may_be_the_last_of_the_keys(queries, window, cap, packed):
    q, k, v, _ = inputs(300)
    documents, q = random_documents(300, 60) if packed else None, q[:, :, -queries:]
    out = CoreAttention(window, SCALE, cap)(q, k, v, documents)
    torch.testing.assert_close(out, masked_attention(q, k, v, documents, window, SCALE, cap), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (5, None), (None, CAP), (5, CAP)])
def test_queries_may_have_a_position_per_row(window, cap):
    q, k, v, _ = inputs(20)
    positions = torch.tensor([[3], [19], [10]])
    attend = CoreAttention(window, SCALE, cap)
    out = attend(q[:, :, -1:], k, v, None, positions)
    for row, position in enumerate(positions[:, 0].tolist()):
        keys = slice(row, row + 1), slice(None), slice(position + 1)
        alone = attend(q[row : row + 1, :, -1:], k[keys], v[keys], None)
        torch.testing.assert_close(out[row : row + 1], alone, rtol=1e-12, atol=1e-12)


def test_half_precision_is_close_and_repeats_to_the_bit():
    documents = random_documents(300, 60)
    *tensors, grad = inputs(300, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        ours, again = (results(CoreAttention(None, SCALE), *tensors, grad, documents) for _ in range(2))
    definition = partial(masked_attention, window=None, scale=SCALE, cap=None)
    wide = [tensor.double() for tensor in (*tensors, grad)]
    for one, other, exact in zip(ours, again, results(definition, *wide, documents), strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other)
        torch.testing.assert_close(one.double(), exact, rtol=0.05, atol=0.05)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("cap", [None, CAP])
@pytest.mark.parametrize("window", [None, 100])
def test_no_tensor_of_sequence_by_sequence_elements_exists(cap, window):
    tokens = 2048
    documents = random_documents(tokens, 400)[:1]
    q, k, v, grad = (tensor[:1, :2].float() for tensor in inputs(tokens))
    with LargestTensor() as largest, MemoryTracker(torch.nn.Module()) as memory:
        out, lse = chunked_attention.chunked_attention(q, k, v, documents, window, SCALE, cap)
        chunked_attention.chunked_attention_backward(grad, q, k, v, out, lse, documents, window, SCALE, cap)
    assert largest.elements < tokens * tokens / 4
    assert memory.peak_total < tokens * tokens * 4


def test_saved_memory_does_not_depend_on_documents():
    """The operator saves its inputs, its output and one number per query and head, as plain attention does."""
    *tensors, _ = inputs(300)
    saved = {}
    for mean in (None, 2, 1000):
        q, k, v = (tensor.clone().requires_grad_() for tensor in tensors)
        documents = None if mean is None else random_documents(300, mean)
        with MemoryTracker(torch.nn.Module()) as memory:
            out = CoreAttention()(q, k, v, documents)
            saved[mean] = sum(memory.current_bytes.values())
        del out
    assert saved[None] == saved[2] == saved[1000] == BATCH * HEADS * 300 * (SIZE + 1) * 8


def test_fake_tensors_and_checkpointing_see_one_operator():
    *tensors, grad = inputs(300)
    documents, attend = random_documents(300, 60), CoreAttention()
    again = partial(checkpoint, attend, use_reentrant=False)
    for one, other in zip(*(results(run, *tensors, grad, documents) for run in (attend, again)), strict=True):
        assert torch.equal(one, other)
    fake = FakeTensors()
    with fake.active():
        tensors = [torch.empty(tensor.shape, requires_grad=True) for tensor in tensors]
        out = attend(*tensors, torch.empty(documents.shape, dtype=torch.long))
        out.sum().backward()
    assert [tensor.grad.shape for tensor in tensors] == [tensor.shape for tensor in tensors]


def test_document_ids_that_decrease_are_refused():
    *tensors, _ = inputs(6)
    with pytest.raises(ValueError, match="document ids decrease along a sequence; expected ids in the order"):
        CoreAttention()(*tensors, torch.tensor([[0, 1, 0, 2, 2, 3]]).expand(3, -1))
