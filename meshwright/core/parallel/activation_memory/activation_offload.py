"""Offload of block inputs: copied to pinned host memory in forward, and back while the block after it runs backward.

Copies run on a stream of their own. The stream of the forward pass waits for the copy of a block's input only when that
of the next block starts, and backward fetches one input ahead, so the host never waits and the copies overlap with
computation. Host buffers are allocated in the first step and reused: pinned memory is slow to allocate.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.core.parallel.activation_memory.activation_checkpoint import CheckpointedBlockStack
from meshwright.core.parallel.parallel_spec import ParallelSpec, find_blocks
from meshwright.core.torch_private import storage_id, tree_leaves

BufferKey = tuple[torch.dtype, torch.Size]


def apply_activation_offload(model: nn.Module, spec: ParallelSpec) -> None:
    """Offloads the inputs of checkpointed blocks or segments. It goes around compiled blocks: a compiled graph cannot
    contain it.
    """
    offload = ActivationOffload()
    stacks = [module for module in model.modules() if isinstance(module, CheckpointedBlockStack)]
    for stack in stacks:
        stack.checkpoint = offload.wrap(stack.checkpoint)
    for block in [] if stacks else find_blocks(model, spec):
        block.forward = offload.wrap(block.forward)


class HostCopy:
    """One offloaded tensor: its host buffer, and the device tensor while it exists."""

    def __init__(self, host: Tensor, tensor: Tensor, previous: HostCopy | None) -> None:
        self.host, self.device = host, tensor.device
        self.tensor: Tensor | None = tensor
        self.copied: torch.cuda.Event | None = None
        """the end of the newest copy, in either direction; None on CPU, where copies are synchronous"""
        self.previous = weakref.ref(previous) if previous is not None else None
        """the tensor that was offloaded before this one, and is needed after it"""


class ActivationOffload:
    """Offloads the inputs of functions that run under `wrap`."""

    def __init__(self) -> None:
        self.buffers: dict[BufferKey, list[Tensor]] = defaultdict(list)
        """host buffers that are not in use"""
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.newest: weakref.ref[HostCopy] | None = None

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(self.run, function)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves = (leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is Tensor)  # no fake tensor, no DTensor
        inputs = {storage_id(leaf) for leaf in leaves if leaf.requires_grad}
        with saved_tensors_hooks(partial(self.pack, inputs), self.unpack):
            return function(*args, **kwargs)

    def pack(self, inputs: set[int], tensor: Tensor) -> Tensor | HostCopy:
        """Starts the copy of an input to the host; other tensors, such as weights, stay where they are."""
        if type(tensor) is not Tensor or storage_id(tensor) not in inputs or not tensor.is_contiguous():
            return tensor
        previous = self.newest() if self.newest is not None else None
        if previous is not None:
            self.free(previous)
        key = tensor.dtype, tensor.shape
        free = self.buffers[key]
        pinned = tensor.device.type == "cuda"
        host = free.pop() if free else torch.empty(key[1], dtype=key[0], pin_memory=pinned)
        copy = HostCopy(host, tensor, previous)
        weakref.finalize(copy, free.append, host)
        with self.beside(copy):
            host.copy_(tensor, non_blocking=True)
        self.newest = weakref.ref(copy)
        return copy

    def unpack(self, packed: Tensor | HostCopy) -> Tensor:
        """Returns the tensor on the device, and starts to fetch the one that backward needs next."""
        if isinstance(packed, Tensor):
            return packed
        tensor = self.fetch(packed)
        self.wait(packed)
        packed.tensor = None
        previous = packed.previous() if packed.previous is not None else None
        if previous is not None:
            self.fetch(previous)
        return tensor

    def fetch(self, copy: HostCopy) -> Tensor:
        """Starts the copy of a tensor to the device, unless it is there."""
        if copy.tensor is None:
            copy.tensor = torch.empty_like(copy.host, device=copy.device)
            with self.beside(copy):
                copy.tensor.copy_(copy.host, non_blocking=True)
                if copy.device.type == "cuda":  # an interrupted backward pass may free it before the copy ends
                    copy.tensor.record_stream(torch.cuda.current_stream())
        return copy.tensor

    def free(self, copy: HostCopy) -> None:
        """Frees the device tensor: kernels that are launched from here on may reuse its memory."""
        self.wait(copy)
        copy.tensor = None

    def wait(self, copy: HostCopy) -> None:
        if copy.copied is not None:  # not `Stream.wait_event`, which is timed as a wait for other ranks
            copy.copied.wait(torch.cuda.current_stream(copy.device))

    @contextmanager
    def beside(self, copy: HostCopy) -> Iterator[None]:
        """Runs a copy on the stream of copies, after all kernels that are launched so far."""
        if copy.device.type != "cuda":
            yield
            return
        if copy.device not in self.streams:
            self.streams[copy.device] = torch.cuda.Stream(copy.device)
        stream = self.streams[copy.device]
        stream.wait_stream(torch.cuda.current_stream(copy.device))
        with torch.cuda.stream(stream):
            yield
        copy.copied = stream.record_event()
