"""Data parallelism: DDP with gradients summed once over ranks, and a count of what it sent.

DDP's default is the mean over ranks. The step has already divided each rank's loss by the token count of the
whole global batch, so the right reduction is the plain sum; the hook below makes it, and nothing divides again.
"""

# No postponed annotations here: DDP reads the hook's own at run time.

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.config import ReplicateConfig
from meshwright.parallel.world import World


@dataclass
class GradientTraffic:
    """What the reduction of one step sent, and the square of this rank's own gradient before it met the others."""

    buckets: int = 0
    message_bytes: int = 0
    local_square: Tensor | None = None


class Replicated:
    """A module whose gradients are the sum over all ranks after each synchronised backward."""

    def __init__(self, module: nn.Module, config: ReplicateConfig, world: World) -> None:
        self.module = module
        self.world = world
        self.compress = config.compress == "bf16"
        self.traffic = GradientTraffic()
        self.on_last_bucket: Callable[[], object] = lambda: None
        self._ddp: DistributedDataParallel | None = None
        if world.size > 1:
            self._ddp = DistributedDataParallel(
                module,
                bucket_cap_mb=config.bucket_mb,
                gradient_as_bucket_view=config.bucket_view,
                static_graph=config.static_graph,
                find_unused_parameters=config.unused,
            )
            self._ddp.register_comm_hook(self, reduce_bucket)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return (self._ddp or self.module)(*inputs)  # type: ignore[no-any-return]

    def synchronised(self, yes: bool) -> AbstractContextManager[None]:
        """Forward and backward inside; gradients meet the other ranks' only if yes."""
        return nullcontext() if yes or self._ddp is None else self._ddp.no_sync()

    def take_traffic(self) -> GradientTraffic:
        """The traffic since the last call."""
        taken, self.traffic = self.traffic, GradientTraffic()
        return taken


def wire_bytes(message: int, ranks: int) -> int:
    """What one rank sends in a ring all-reduce: 2 (n - 1) / n times the message."""
    return 2 * (ranks - 1) * message // ranks


def reduce_bucket(state: Replicated, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sums one bucket over ranks, asynchronously. DDP calls it in bucket order, as soon as a bucket's gradients are
    there.
    """
    gradient = bucket.buffer()
    traffic = state.traffic
    square = torch.linalg.vector_norm(gradient).square()
    traffic.local_square = square if traffic.local_square is None else traffic.local_square + square
    sent = gradient.bfloat16() if state.compress else gradient
    traffic.buckets += 1
    traffic.message_bytes += sent.numel() * sent.element_size()
    if bucket.is_last():  # every gradient is computed: what DDP still waits for is exposed communication
        state.on_last_bucket()
    state.world.page.collective(f"gradient bucket {bucket.index()}")
    reduced: torch.futures.Future[list[Tensor]] = dist.all_reduce(sent, async_op=True).get_future()
    if state.compress:
        return reduced.then(lambda done: gradient.copy_(done.value()[0]))
    return reduced.then(lambda done: done.value()[0])
