"""Data parallelism by DDP, with gradients summed over ranks and the bytes of the reduction counted.

DDP averages gradients by default. The step has already divided each rank's loss by the token count of the global batch,
so the comm hook below sums them instead.
"""

# No `from __future__ import annotations` here: DDP reads the annotations of the comm hook at run time.

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.base.config import DDPConfig
from meshwright.core.parallel.parallel_model import (
    Autocast,
    GradientReduction,
    ParallelModel,
    rounded_parameters,
    stateful_buffers,
    unchanged_module,
)
from meshwright.core.parallel.world import World


class GradientBucket(Protocol):
    """The interface of DDP's GradBucket that the comm hook uses."""

    def index(self) -> int: ...
    def buffer(self) -> Tensor: ...
    def gradients(self) -> list[Tensor]: ...
    def parameters(self) -> list[Tensor]: ...
    def is_last(self) -> bool: ...


class ReplicatedModel(ParallelModel):
    """A full replica on every rank, whose gradients are summed over all ranks by buckets."""

    def __init__(self, module: nn.Module, config: DDPConfig, world: World) -> None:
        super().__init__(module)
        self.world = world
        self.compress_bf16 = config.comm_hook == "bf16_compress"
        # With find_unused_parameters, an unused parameter must have no gradient instead of a zero gradient.
        self.zero_in_place = config.gradient_as_bucket_view and not config.find_unused_parameters
        self.reduction = GradientReduction()
        self.buckets: dict[int, Tensor] = {}
        self.accumulated: dict[Tensor, Tensor] = {}
        """rounded weight -> the float32 sum of its gradients of this step's micro-batches but the last"""

    def internal_tensors(self) -> Iterable[tuple[str, Tensor]]:
        return [("gradient", tensor) for tensor in (*self.buckets.values(), *self.accumulated.values())]

    def accumulate(self, micro_batches: int) -> None:
        """DDP's buckets have the dtype of the parameters, so gradients of rounded weights accumulate beside them."""
        if micro_batches != self.micro_batches:
            self.micro_batches = micro_batches
            rounded = rounded_parameters(self.module) if micro_batches > 1 else ()
            self.accumulated = {p: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for p in rounded}

    @torch.no_grad()
    def keep_gradients(self) -> None:
        """Adds the gradients of a micro-batch that is not the last to `accumulated`, and clears them."""
        for parameter, total in self.accumulated.items():
            if parameter.grad is not None:
                total.add_(parameter.grad)
                parameter.grad = parameter.grad.zero_() if self.zero_in_place else None

    def pop_gradient_reduction(self) -> GradientReduction:
        reduction, self.reduction = self.reduction, GradientReduction()
        return reduction


class DDPModel(ReplicatedModel):
    """A replica that DistributedDataParallel wraps."""

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
        # Garbage collection does not see the references of DDP's reducer: a strong one would keep this model forever.
        self.ddp.register_comm_hook(weakref.proxy(self), reduce_bucket)
        self.groups = [self.ddp.process_group]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.ddp(*inputs)  # type: ignore[no-any-return]

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        with nullcontext() if last else self.ddp.no_sync():
            yield
        if not last:
            self.keep_gradients()

    def warmup_backward(self, load_inputs: Callable[[], tuple[Tensor, ...] | None], autocast: Autocast) -> None:
        """DDP rebuilds its buckets, and with them the order of its sums, after its first backward pass. A resumed run
        must start with the buckets that an uninterrupted run has by then, so the first backward pass is discarded.
        """
        inputs = load_inputs()
        if inputs is None:
            return
        with unchanged_module(self.module):
            with autocast():
                losses, _ = self(*inputs)
            losses.backward()
        self.buckets.clear()  # DDP builds new ones now

    def broadcast_masters(self) -> None:
        """DDP has copied the weights of the first rank to the others, whose modules may have had other values."""
        for master in self.masters.values():
            dist.broadcast(master, src=0)

    @property
    def wrapped_module(self) -> nn.Module:
        return self.ddp


def reduce_bucket(state: DDPModel, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The comm hook: sums one bucket over all ranks asynchronously. DDP calls it in bucket order, as soon as the
    gradients of a bucket are ready.
    """
    gradient, message = bucket.buffer(), bucket_message(state, bucket)
    reduced: torch.futures.Future[list[Tensor]] = dist.all_reduce(message, async_op=True).get_future()
    if message is gradient:
        return reduced.then(lambda done: done.value()[0])
    return reduced.then(lambda done: gradient.copy_(done.value()[0]))


def bucket_message(state: ReplicatedModel, bucket: GradientBucket) -> Tensor:
    """Returns the tensor to all-reduce for a bucket, and counts it. Unless it is compressed, it is summed in float32 at
    least, if there is anything to sum.
    """
    gradient = bucket.buffer()
    wide = torch.promote_types(gradient.dtype, torch.float32)
    local = gradient.to(wide) if state.world.size > 1 or state.accumulated else gradient
    for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True) if state.accumulated else ():
        start = view.storage_offset() - gradient.storage_offset()
        local[start : start + view.numel()].as_strided(view.shape, view.stride()).add_(state.accumulated[parameter])
        state.accumulated[parameter].zero_()
    reduction = state.reduction
    if state.world.size > 1:  # the gradient of one rank is that of the global batch
        square = torch.linalg.vector_norm(local, dtype=wide).square()
        reduction.local_square = square if reduction.local_square is None else reduction.local_square + square
    if bucket.index() == 0:
        state.buckets.clear()  # DDP builds new buckets after its first backward pass
    state.buckets[bucket.index()] = gradient
    message = local.bfloat16() if state.compress_bf16 else local
    reduction.buckets += 1
    reduction.message_bytes += message.numel() * message.element_size()
    if bucket.is_last():  # backward is done: DDP only waits for exposed communication now
        state.on_last_bucket()
    state.world.heartbeat.collective(f"gradient bucket {bucket.index()}")
    return message
