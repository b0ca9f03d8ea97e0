"""Blockwise attention: merged blocks and summed gradients equal full attention, in torch and by flash kernels."""

from __future__ import annotations

import pytest
import torch

from meshwright.core.models.layers.attention import CoreAttention
from meshwright.core.parallel.context_parallel.blockwise_attention import (
    AttentionMask,
    AttentionResult,
    accumulation_dtype,
    block_attention,
    block_attention_backward,
    merge_result,
    uses_flash_kernel,
)
from meshwright.core.parallel.context_parallel.ring_attention import visible_slices
from meshwright.core.parallel.context_parallel.sequence_chunks import SequenceChunks

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
    tensors = [torch.randn(BATCH, n, sequence, size, generator=generator, dtype=torch.float64) for n in heads]
    return [tensor.to(device, dtype) for tensor in tensors]


def full_attention(q, k, v, grad, documents):
    """Output, dq, dk and dv of CoreAttention."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
    out = CoreAttention()(q, k, v, documents)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def simulated_ring(q, k, v, grad, documents, ranks: int):
    """Runs the ring steps of all ranks in one process: output, dq, dk and dv of full sequences."""
    chunks = [SequenceChunks("ring", ranks, rank) for rank in range(ranks)]
    by_rank = [[chunk.select(tensor, 2) for tensor in (q, k, v, grad)] for chunk in chunks]
    dtype_wide = accumulation_dtype(q.dtype)
    sums = [torch.zeros(tensor.shape, dtype=dtype_wide, device=q.device) for tensor in (q, q, k, v)]
    for rank, (own_q, _, _, own_grad) in enumerate(by_rank):
        steps = []
        for source in range(ranks):
            queries, keys = visible_slices(rank, source, own_q.shape[2])
            mask = AttentionMask(source == rank)
            if documents is not None:
                query_documents, theirs = chunks[rank].select(documents), chunks[source].select(documents)
                mask = AttentionMask(source == rank, query_documents[:, queries], theirs[:, keys])
            steps.append((source, queries, keys, mask))
        result = AttentionResult(
            torch.zeros(own_q.shape, dtype=dtype_wide, device=q.device),
            torch.full(own_q.shape[:3], -torch.inf, dtype=dtype_wide, device=q.device),
        )
        for source, queries, keys, mask in steps:
            part = block_attention(own_q[:, :, queries], *(t[:, :, keys] for t in by_rank[source][1:3]), mask)
            merge_result(AttentionResult(result.out[:, :, queries], result.lse[:, :, queries]), part)
        at = chunks[rank].positions(q.shape[2]).to(q.device)
        sums[0][:, :, at] = result.out
        out = result.out.to(q.dtype)
        for source, queries, keys, mask in steps:
            gradients = block_attention_backward(
                own_grad[:, :, queries],
                own_q[:, :, queries],
                *(t[:, :, keys] for t in by_rank[source][1:3]),
                AttentionResult(out[:, :, queries], result.lse[:, :, queries]),
                mask,
            )
            theirs = chunks[source].positions(q.shape[2]).to(q.device)[keys]
            for total, positions, gradient in zip(sums[1:], (at[queries], theirs, theirs), gradients, strict=True):
                total[:, :, positions] += gradient
    return sums


def max_error(ours, theirs) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_merged_blocks_equal_full_attention(kv_heads, documents):
    docs = DOCUMENTS[documents]
    tensors = inputs(24, kv_heads, torch.float64)
    for ranks in (1, 2, 3):
        assert max_error(simulated_ring(*tensors, docs, ranks), full_attention(*tensors, docs)) < 1e-13
    narrow = [tensor.float() for tensor in tensors]
    assert (
        max_error(simulated_ring(*narrow, docs, 2), full_attention(*tensors, docs)) < 2e-6
    )  # a few roundings of float32


def test_bf16_blocks_accumulate_in_float32():
    """The error is that of rounding the inputs and the saved output to bf16, not that of sums in bf16."""
    tensors = inputs(24, 2, torch.bfloat16)
    ours = simulated_ring(*tensors, None, 2)
    exact = full_attention(*(tensor.double() for tensor in tensors), None)
    assert {tensor.dtype for tensor in ours} == {torch.float32}
    assert max_error(ours[:1], exact[:1]) < 2e-6
    assert max_error(ours[1:], exact[1:]) < 2e-2
    with torch.autocast("cpu", torch.bfloat16):  # autocast must not change the dtype of the products
        assert max_error(simulated_ring(*tensors, None, 2), ours) == 0


def test_query_without_visible_keys_has_no_effect():
    q, k, v, grad = inputs(4, 2, torch.float64)
    other_document = AttentionMask(query_documents=torch.zeros(BATCH, 4), key_documents=torch.ones(BATCH, 4))
    empty = block_attention(q, k, v, other_document)
    assert torch.isneginf(empty.lse).all()
    assert not empty.out.any()
    merged = AttentionResult(empty.out.clone(), empty.lse.clone())
    merge_result(merged, empty)
    assert torch.isneginf(merged.lse).all()
    assert not merged.out.any()
    assert not any(gradient.any() for gradient in block_attention_backward(grad, q, k, v, empty, other_document))
    visible = block_attention(q, k, v, AttentionMask(causal=True))
    merge_result(merged, visible)
    assert torch.equal(merged.out, visible.out)
    merge_result(merged, empty)
    assert torch.equal(merged.out, visible.out)


def test_grouped_query_heads_do_not_copy_keys():
    q, k, v, _ = inputs(4, 1, torch.float64)
    tensors = []
    matmul = torch.ops.aten.bmm.default

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is matmul:
                tensors.append((args[0].shape[0], args[1].data_ptr()))
            return func(*args, **(kwargs or {}))

    with Watch():
        block_attention(q, k, v, AttentionMask())
    assert tensors == [(BATCH, k.data_ptr()), (BATCH, v.data_ptr())]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels for CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_flash_kernels_equal_reference_attention(kv_heads, dtype):
    tensors = inputs(192, kv_heads, dtype, "cuda", size=64)
    assert uses_flash_kernel(tensors[0], AttentionMask())
    assert not uses_flash_kernel(
        tensors[0], AttentionMask(query_documents=torch.zeros(1), key_documents=torch.zeros(1))
    )
    exact = full_attention(*(tensor.double() for tensor in tensors), None)
    for ranks in (1, 2, 3):
        ours = simulated_ring(*tensors, None, ranks)
        kernel = full_attention(*tensors, None)
        for name, one, other, true in zip(("out", "dq", "dk", "dv"), ours, kernel, exact, strict=True):
            # blocks round once more than the kernel over full sequences
            assert max_error([one], [true]) < 2 * max_error([other], [true]) + 1e-3, name
