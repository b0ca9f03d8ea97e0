"""DDP for fake tensors: a reimplementation of its gradient buckets, because DDP's reducer needs real memory.

DDP fills a bucket with gradients in the order in which the first backward pass produces them, until the bucket holds
`bucket_cap_mb` or more. It all-reduces a bucket as soon as the bucket's last gradient is ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.base.config import DDPConfig
from meshwright.core.parallel.data_parallel.ddp import ReplicatedModel, bucket_message
from meshwright.core.parallel.parallel_model import stateful_buffers
from meshwright.core.parallel.world import World

MIB = 1 << 20


def bucket_counts(sizes: Sequence[int], capacity: float) -> list[int]:
    """Returns the number of gradients in each bucket; `sizes` and `capacity` are in bytes."""
    counts, filled = [0], 0
    for size in sizes:
        if filled >= capacity:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return counts if sizes else []


class FakeBucket:
    """One gradient bucket, with a view of it for each of its parameters."""

    def __init__(self, number: int, parameters: list[nn.Parameter], last: bool) -> None:
        self.number, self.last = number, last
        self.flat = parameters[0].new_empty(sum(p.numel() for p in parameters), requires_grad=False)
        slices = self.flat.split([p.numel() for p in parameters])
        self.views = {id(p): flat.view_as(p) for p, flat in zip(parameters, slices, strict=True)}
        self.pending = set(self.views)
        self.members = parameters

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return list(self.views.values())

    def parameters(self) -> list[Tensor]:
        return list(self.members)

    def is_last(self) -> bool:
        return self.last


class FakeDDP(ReplicatedModel):
    """All-reduces every gradient bucket, as DDP does."""

    def __init__(self, module: nn.Module, config: DDPConfig, world: World) -> None:
        super().__init__(module, config, world)
        self.capacity, self.bucket_views = config.bucket_cap_mb * MIB, config.gradient_as_bucket_view
        self.last_micro_step = self.broadcasts = True
        self.ready_order: list[nn.Parameter] = []
        """the parameters in the order in which the first backward pass produces their gradients"""
        self.bucket_of: dict[int, FakeBucket] = {}
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        if self.broadcasts:  # DDP broadcasts buffers in the first forward pass after an all-reduce
            self.broadcast_flat_buffers()
        self.broadcasts = self.last_micro_step
        with torch.enable_grad():
            return super().__call__(*inputs)

    def broadcast_flat_buffers(self) -> None:
        """Broadcasts all buffers of a dtype as one message, as DDP does."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in stateful_buffers(self.module):
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            dist.broadcast(torch.cat([buffer.flatten() for buffer in buffers]), 0)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        self.last_micro_step = last
        with super().micro_step(last):
            yield
        if not last:
            self.keep_gradients()
        if last and not self.bucket_of:
            self.build_buckets()
        for bucket in self.bucket_of.values():
            bucket.pending = set(bucket.views)

    @torch.no_grad()
    def build_buckets(self) -> None:
        counts = bucket_counts([p.numel() * p.element_size() for p in self.ready_order], self.capacity)
        start = 0
        for number, count in enumerate(counts):
            members = self.ready_order[start : start + count]
            bucket = FakeBucket(number, members, number == len(counts) - 1)
            self.bucket_of |= {id(p): bucket for p in members}
            self.buckets[number] = bucket.flat
            start += count
            for parameter in members if self.bucket_views else ():
                parameter.grad = bucket.views[id(parameter)]

    @torch.no_grad()
    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Copies a gradient into its bucket unless it is a view of it, and all-reduces a bucket that is complete."""
        if not self.bucket_of:
            if all(p is not parameter for p in self.ready_order):
                self.ready_order.append(parameter)
            return
        bucket, gradient = self.bucket_of[id(parameter)], parameter.grad
        assert gradient is not None
        view = bucket.views[id(parameter)]
        if gradient is not view and (self.bucket_views or self.last_micro_step):
            view.copy_(gradient)
        if self.bucket_views:
            parameter.grad = view
        if not self.last_micro_step:
            return
        bucket.pending.discard(id(parameter))
        if not bucket.pending:
            self.all_reduce(bucket)

    def all_reduce(self, bucket: FakeBucket) -> None:
        message = bucket_message(self, bucket)
        dist.all_reduce(message)
        if message is not bucket.flat:
            bucket.flat.copy_(message)
