"""Blocks of attention merge to the whole, and their gradients add up to the whole's; by plain torch and by kernels."""

from __future__ import annotations

import pytest
import torch

from meshwright.models.decoder import CoreAttention
from meshwright.parallel.context_parallel.blockwise_attention import (
    AttentionMask,
    AttentionResult,
    accumulation_dtype,
    block_attention,
    block_attention_backward,
    merge_result,
    uses_flash_kernel,
)
from meshwright.parallel.context_parallel.ring_attention import visible_slices
from meshwright.parallel.context_parallel.sequence_chunks import SequenceChunks

BATCH, HEADS, SIZE = 2, 4, 8
DOCUMENTS = {
    "one": None,
    "several": torch.tensor([[0] * 5 + [1] + [2] * 10 + [3] * 8, [0] * 12 + [1] * 12]),
    "single tokens": torch.arange(24).expand(2, -1),
}


def inputs(sequence: int, kv_heads: int, dtype: torch.dtype, device: str = "cpu", size: int = SIZE):
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(sequence + kv_heads)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    made = [torch.randn(BATCH, n, sequence, size, generator=generator, dtype=torch.float64) for n in heads]
    return [tensor.to(device, dtype) for tensor in made]


def whole(q, k, v, grad, documents):
    """Out, dq, dk, dv on one process."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
    out = CoreAttention()(q, k, v, documents)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def ring_by_hand(q, k, v, grad, documents, ranks: int):
    """Every rank's visits of a ring, one after the other in one process: out, dq, dk, dv of whole sequences."""
    pieces = [SequenceChunks("ring", ranks, rank) for rank in range(ranks)]
    mine = [[piece.select(tensor, 2) for tensor in (q, k, v, grad)] for piece in pieces]
    precise = accumulation_dtype(q.dtype)
    sums = [torch.zeros(tensor.shape, dtype=precise, device=q.device) for tensor in (q, q, k, v)]
    for rank, (own_q, _, _, own_grad) in enumerate(mine):
        visits = []
        for source in range(ranks):
            rows, columns = visible_slices(rank, source, own_q.shape[2])
            mask = AttentionMask(source == rank)
            if documents is not None:
                mine_docs, theirs = pieces[rank].select(documents), pieces[source].select(documents)
                mask = AttentionMask(source == rank, mine_docs[:, rows], theirs[:, columns])
            visits.append((source, rows, columns, mask))
        result = AttentionResult(
            torch.zeros(own_q.shape, dtype=precise, device=q.device),
            torch.full(own_q.shape[:3], -torch.inf, dtype=precise, device=q.device),
        )
        for source, rows, columns, mask in visits:
            part = block_attention(own_q[:, :, rows], *(t[:, :, columns] for t in mine[source][1:3]), mask)
            merge_result(AttentionResult(result.out[:, :, rows], result.lse[:, :, rows]), part)
        at = pieces[rank].positions(q.shape[2]).to(q.device)
        sums[0][:, :, at] = result.out
        out = result.out.to(q.dtype)
        for source, rows, columns, mask in visits:
            gradients = block_attention_backward(
                own_grad[:, :, rows],
                own_q[:, :, rows],
                *(t[:, :, columns] for t in mine[source][1:3]),
                AttentionResult(out[:, :, rows], result.lse[:, :, rows]),
                mask,
            )
            theirs = pieces[source].positions(q.shape[2]).to(q.device)[columns]
            for total, places, gradient in zip(sums[1:], (at[rows], theirs, theirs), gradients, strict=True):
                total[:, :, places] += gradient
    return sums


def worst(ours, theirs) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_blocks_add_up_to_the_whole(kv_heads, documents):
    docs = DOCUMENTS[documents]
    made = inputs(24, kv_heads, torch.float64)
    for ranks in (1, 2, 3):
        assert worst(ring_by_hand(*made, docs, ranks), whole(*made, docs)) < 1e-13
    narrow = [tensor.float() for tensor in made]
    assert worst(ring_by_hand(*narrow, docs, 2), whole(*made, docs)) < 2e-6  # a few roundings of float32


def test_bf16_is_summed_in_float32():
    """The error is that of rounding the inputs and the saved output to bf16, not that of sums in bf16."""
    made = inputs(24, 2, torch.bfloat16)
    ours = ring_by_hand(*made, None, 2)
    exact = whole(*(tensor.double() for tensor in made), None)
    assert {tensor.dtype for tensor in ours} == {torch.float32}
    assert worst(ours[:1], exact[:1]) < 2e-6
    assert worst(ours[1:], exact[1:]) < 2e-2
    with torch.autocast("cpu", torch.bfloat16):  # casts no product here
        assert worst(ring_by_hand(*made, None, 2), ours) == 0


def test_a_query_that_sees_nothing_weighs_nothing():
    q, k, v, grad = inputs(4, 2, torch.float64)
    foreign = AttentionMask(query_documents=torch.zeros(BATCH, 4), key_documents=torch.ones(BATCH, 4))
    blind = block_attention(q, k, v, foreign)
    assert torch.isneginf(blind.lse).all()
    assert not blind.out.any()
    both = AttentionResult(blind.out.clone(), blind.lse.clone())
    merge_result(both, blind)
    assert torch.isneginf(both.lse).all()
    assert not both.out.any()
    assert not any(gradient.any() for gradient in block_attention_backward(grad, q, k, v, blind, foreign))
    seeing = block_attention(q, k, v, AttentionMask(causal=True))
    merge_result(both, seeing)
    assert torch.equal(both.out, seeing.out)
    merge_result(both, blind)
    assert torch.equal(both.out, seeing.out)


def test_keys_are_not_copied_for_the_heads_that_share_them():
    q, k, v, _ = inputs(4, 1, torch.float64)
    made = []
    matmul = torch.ops.aten.bmm.default

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is matmul:
                made.append((args[0].shape[0], args[1].data_ptr()))
            return func(*args, **(kwargs or {}))

    with Watch():
        block_attention(q, k, v, AttentionMask())
    assert made == [(BATCH, k.data_ptr()), (BATCH, v.data_ptr())]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels for CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_flash_kernels_give_what_plain_attention_does(kv_heads, dtype):
    made = inputs(192, kv_heads, dtype, "cuda", size=64)
    assert uses_flash_kernel(made[0], AttentionMask())
    assert not uses_flash_kernel(made[0], AttentionMask(query_documents=torch.zeros(1), key_documents=torch.zeros(1)))
    exact = whole(*(tensor.double() for tensor in made), None)
    for ranks in (1, 2, 3):
        ours = ring_by_hand(*made, None, ranks)
        kernel = whole(*made, None)
        for name, one, other, true in zip(("out", "dq", "dk", "dv"), ours, kernel, exact, strict=True):
            # no further from the truth than the kernel over the whole is, twice, since blocks round once more
            assert worst([one], [true]) < 2 * worst([other], [true]) + 1e-3, name
