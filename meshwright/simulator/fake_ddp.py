"""DDP of imagined tensors: its buckets, and when each is summed. DDP itself works on memory that is not there.

Its rule: gradients fill a bucket in the order in which they come, until it holds `bucket_cap_mb` or more; a bucket is
summed when its last gradient is there. The first pass finds that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.config import DDPConfig
from meshwright.parallel.data_parallel.ddp import ReplicatedModel, bucket_message
from meshwright.parallel.world import World

MIB = 1 << 20


def bucket_counts(sizes: Sequence[int], most: float) -> list[int]:
    """How many of these, in order, each bucket takes; sizes in bytes."""
    counts, held = [0], 0
    for size in sizes:
        if held >= most:
            counts.append(0)
            held = 0
        counts[-1] += 1
        held += size
    return counts if sizes else []


class FakeBucket:
    """A bucket, and the parameters whose gradients lie in it."""

    def __init__(self, number: int, parameters: list[nn.Parameter], last: bool) -> None:
        self.number, self.last = number, last
        self.flat = parameters[0].new_empty(sum(p.numel() for p in parameters), requires_grad=False)
        parts = self.flat.split([p.numel() for p in parameters])
        self.views = {id(p): part.view_as(p) for p, part in zip(parameters, parts, strict=True)}
        self.missing = set(self.views)

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def is_last(self) -> bool:
        return self.last


class FakeDDP(ReplicatedModel):
    """Sums every bucket of gradients over all ranks, as DDP would."""

    def __init__(self, module: nn.Module, config: DDPConfig, world: World) -> None:
        super().__init__(module, config, world)
        self.most, self.views, self.last = config.bucket_cap_mb * MIB, config.gradient_as_bucket_view, True
        self.came: list[nn.Parameter] = []
        self.where: dict[int, FakeBucket] = {}
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.comes)

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        self.last = last
        with super().micro_step(last):
            yield
        if last and not self.where:
            self.fill()
        for filling in self.where.values():
            filling.missing = set(filling.views)

    @torch.no_grad()
    def fill(self) -> None:
        counts = bucket_counts([p.numel() * p.element_size() for p in self.came], self.most)
        start = 0
        for number, count in enumerate(counts):
            members = self.came[start : start + count]
            filling = FakeBucket(number, members, number == len(counts) - 1)
            self.where |= {id(p): filling for p in members}
            self.buckets[number] = filling.flat
            start += count
            for parameter in members if self.views else ():
                parameter.grad = filling.views[id(parameter)]

    @torch.no_grad()
    def comes(self, parameter: nn.Parameter) -> None:
        """A gradient is there: into its bucket, unless it lies there already."""
        if not self.where:
            if all(p is not parameter for p in self.came):
                self.came.append(parameter)
            return
        filling, gradient = self.where[id(parameter)], parameter.grad
        assert gradient is not None
        view = filling.views[id(parameter)]
        if gradient is not view and (self.views or self.last):
            view.copy_(gradient)
        if self.views:
            parameter.grad = view
        if not self.last:
            return
        filling.missing.discard(id(parameter))
        if not filling.missing:
            self.sum(filling)

    def sum(self, filling: FakeBucket) -> None:
        sent = bucket_message(self, filling)
        dist.all_reduce(sent)
        if self.compress_bf16:
            filling.flat.copy_(sent)
