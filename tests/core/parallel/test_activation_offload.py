"""Offload of block inputs: it changes no bit, and keeps no device tensor between forward and backward."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from meshwright.core.parallel.activation_memory.activation_offload import ActivationOffload, HostCopy

LAYERS = 4


class Observed(ActivationOffload):
    """Records what is offloaded and which copies to the device start."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[weakref.ref[HostCopy]] = []
        self.events: list[str] = []

    def pack(self, inputs, tensor):
        packed = super().pack(inputs, tensor)
        if isinstance(packed, HostCopy):
            self.copies.append(weakref.ref(packed))
        return packed

    def fetch(self, copy):
        if copy.tensor is None:
            self.events.append(f"fetch {self.index(copy)}")
        return super().fetch(copy)

    def unpack(self, packed):
        if isinstance(packed, HostCopy):
            self.events.append(f"use {self.index(packed)}")
        return super().unpack(packed)

    def index(self, copy) -> int:
        return [reference() for reference in self.copies].index(copy)


def layers() -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(LAYERS)
    )


def run(blocks, wrap=lambda function: function) -> list[torch.Tensor]:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = x * 2
    for block in blocks:
        y = wrap(partial(checkpoint, block, use_reentrant=False))(y)
    y.square().sum().backward()
    gradients = [x.grad, *(p.grad for p in blocks.parameters())]
    for parameter in blocks.parameters():
        parameter.grad = None
    return gradients


def test_offloaded_inputs_change_no_bit_and_are_fetched_one_block_ahead():
    offload, blocks = Observed(), layers()
    expected = run(blocks)
    for ours, theirs in zip(run(blocks, offload.wrap), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len(offload.copies) == LAYERS  # the inputs, and no weight
    # The input of the last block is still on the device.
    assert offload.events == ["use 3", "fetch 2", "use 2", "fetch 1", "use 1", "fetch 0", "use 0"]


def test_host_buffers_are_reused_by_later_steps():
    offload, blocks = ActivationOffload(), layers()
    run(blocks, offload.wrap)
    buffers = [buffer for free in offload.buffers.values() for buffer in free]
    addresses = {buffer.data_ptr() for buffer in buffers}
    assert len(addresses) == LAYERS
    assert not any(buffer.requires_grad for buffer in buffers)
    for _ in range(2):
        run(blocks, offload.wrap)
    assert {buffer.data_ptr() for free in offload.buffers.values() for buffer in free} == addresses


def test_offloaded_inputs_are_freed_between_forward_and_backward():
    offload, (first, second, *_) = ActivationOffload(), layers()
    x = torch.ones(3, 8, requires_grad=True)
    inner = x * 2
    freed = weakref.ref(inner)
    hidden = offload.wrap(partial(checkpoint, first, use_reentrant=False))(inner)
    del inner
    assert freed() is not None  # until the next copy starts
    out = offload.wrap(partial(checkpoint, second, use_reentrant=False))(hidden)
    assert freed() is None
    out.sum().backward()
    assert x.grad is not None


def test_a_graph_that_is_retained_unpacks_twice():
    offload, blocks = ActivationOffload(), layers()
    x = torch.ones(3, 8, requires_grad=True)
    y = x * 2
    for block in blocks:
        y = offload.wrap(partial(checkpoint, block, use_reentrant=False))(y)
    first, again = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_inputs_of_compiled_blocks_are_offloaded():
    offload, blocks = Observed(), layers()
    expected = run(blocks)

    def compiled(function):
        return offload.wrap(torch.compile(function, backend="aot_eager"))

    for ours, theirs in zip(run(blocks, compiled), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert len(offload.copies) == LAYERS
