"""Activations that leave the device come back unchanged, and their device memory is reused meanwhile."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from meshwright.core.parallel.activation_memory.activation_offload import ActivationOffload

pytestmark = pytest.mark.cuda

LAYERS, ROWS, WIDTH = 8, 8192, 1024


def run(blocks, wrap=lambda function: function) -> tuple[list[torch.Tensor], int]:
    """The gradients, and the bytes that are allocated between forward and backward."""
    x = torch.randn(ROWS, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).requires_grad_()
    base = torch.cuda.memory_allocated()
    y = x * 2
    for block in blocks:
        y = wrap(partial(checkpoint, block, use_reentrant=False))(y)
    kept = torch.cuda.memory_allocated() - base
    y.square().sum().backward()
    gradients = [x.grad, *(p.grad for p in blocks.parameters())]
    for parameter in blocks.parameters():
        parameter.grad = None
    return gradients, kept


def test_offloaded_inputs_change_no_bit_on_cuda_and_free_their_memory():
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)
    ).cuda()
    run(blocks)  # allocates the workspace of cuBLAS
    expected, kept = run(blocks)
    offload = ActivationOffload()
    tensor = ROWS * WIDTH * 4
    for _ in range(3):
        gradients, less = run(blocks, offload.wrap)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))
        assert kept - less == (LAYERS - 1) * tensor  # the input of the last block is still there
    assert all(buffer.is_pinned() for free in offload.buffers.values() for buffer in free)
