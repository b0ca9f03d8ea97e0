"""Data parallelism: DDP with gradients summed once over ranks, and a count of what it sent.

DDP's default is the mean over ranks. The step has already divided each rank's loss by the token count of the
whole global batch, so the right reduction is the plain sum; the hook below makes it, and nothing divides again.
"""

# No postponed annotations here: DDP reads the hook's own at run time.

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.config import DDPConfig
from meshwright.parallel.parallel_model import Autocast, GradientReduction, ParallelModel, stateful_buffers
from meshwright.parallel.world import World


class GradientBucket(Protocol):
    """Gradients that are summed together, as DDP shows them to its hook."""

    def index(self) -> int: ...
    def buffer(self) -> Tensor: ...
    def is_last(self) -> bool: ...


class ReplicatedModel(ParallelModel):
    """Copies of the whole module, whose gradients are summed over all ranks bucket by bucket."""

    def __init__(self, module: nn.Module, config: DDPConfig, world: World) -> None:
        super().__init__(module)
        self.world = world
        self.compress_bf16 = config.comm_hook == "bf16_compress"
        # A parameter that a step does not use must have no gradient rather than one of zero.
        self.zero_in_place = config.gradient_as_bucket_view and not config.find_unused_parameters
        self.traffic = GradientReduction()
        self.buckets: dict[int, Tensor] = {}

    def internal_tensors(self) -> Iterable[tuple[str, Tensor]]:
        return [("gradient", bucket) for bucket in self.buckets.values()]

    def pop_gradient_reduction(self) -> GradientReduction:
        taken, self.traffic = self.traffic, GradientReduction()
        return taken


class DDPModel(ReplicatedModel):
    """By DDP."""

    def __init__(self, module: nn.Module, config: DDPConfig, world: World) -> None:
        super().__init__(module, config, world)
        with warnings.catch_warnings():
            # torch 2.13 deprecates `broadcast_buffers`; its successor does not exist in 2.11 and broadcasts at init.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            self.ddp = DistributedDataParallel(
                module,
                bucket_cap_mb=config.bucket_cap_mb,
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                static_graph=config.static_graph,
                find_unused_parameters=config.find_unused_parameters,
                broadcast_buffers=any(True for _ in stateful_buffers(module)),
            )
        self.ddp.register_comm_hook(self, reduce_bucket)
        self.groups = [self.ddp.process_group]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.ddp(*inputs)  # type: ignore[no-any-return]

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        with nullcontext() if last else self.ddp.no_sync():
            yield

    def warmup_backward(self, load_inputs: Callable[[], tuple[Tensor, ...] | None], autocast: Autocast) -> None:
        """DDP rebuilds its buckets, and with them the order of its sums, after its first backward pass. A resumed run
        must start with the buckets that an uninterrupted run has by then, so the first backward pass is discarded.
        """
        inputs = load_inputs()
        if inputs is None:
            return
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        with autocast():
            losses, _ = self(*inputs)
        losses.backward()
        self.buckets.clear()  # DDP builds new ones now
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    @property
    def wrapped_module(self) -> nn.Module:
        return self.ddp


def reduce_bucket(state: DDPModel, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sums one bucket over ranks, asynchronously. DDP calls it in bucket order, as soon as a bucket's gradients are
    there.
    """
    gradient, sent = bucket.buffer(), bucket_message(state, bucket)
    reduced: torch.futures.Future[list[Tensor]] = dist.all_reduce(sent, async_op=True).get_future()
    if state.compress_bf16:
        return reduced.then(lambda done: gradient.copy_(done.value()[0]))
    return reduced.then(lambda done: done.value()[0])


def bucket_message(state: ReplicatedModel, bucket: GradientBucket) -> Tensor:
    """What of a bucket is sent; it is on record then."""
    gradient = bucket.buffer()
    traffic = state.traffic
    square = torch.linalg.vector_norm(gradient).square()
    traffic.local_square = square if traffic.local_square is None else traffic.local_square + square
    if bucket.index() == 0:
        state.buckets.clear()  # DDP makes new ones after its first pass
    state.buckets[bucket.index()] = gradient
    sent = gradient.bfloat16() if state.compress_bf16 else gradient
    traffic.buckets += 1
    traffic.message_bytes += sent.numel() * sent.element_size()
    if bucket.is_last():  # every gradient is computed: what DDP still waits for is exposed communication
        state.on_last_bucket()
    state.world.heartbeat.collective(f"gradient bucket {bucket.index()}")
    return sent
