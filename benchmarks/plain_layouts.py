"""Hand-written steps on plain torch for each layout: DDP, FSDP2, and tensor with sequence parallelism by DTensor.

Nothing here comes from Meshwright but the model that is trained. Each loop is as one would write it with torch's own
documentation open, and with what costs nothing to know: gathers shared by q, k and v, one sum for all norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from meshwright.models.decoder import LanguageModel

RANKS = 2


@dataclass(frozen=True)
class Given:
    """What both sides of the comparison share."""

    model: LanguageModel
    """whole, with its initial weights"""
    batches: Iterator[list[Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    share_of_peak: Callable[[int], float]
    clip: float
    read_every: int


def nothing() -> None:
    pass


def ddp(given: Given) -> Callable[[int], float]:
    return loop(given, DistributedDataParallel(given.model, gradient_as_bucket_view=True))


def fsdp(given: Given, reshard: bool) -> Callable[[int], float]:
    """A unit for each block, one for the embedding, one for norm and head, as Meshwright makes them. With `reshard` a
    unit is let go after its forward and gathered again for its backward, also as there.
    """
    model, mesh = given.model, init_device_mesh("cpu", (RANKS,))
    decoder = model.decoder
    for unit in ([decoder.embedding], *([block] for block in decoder.blocks), [decoder.norm, model.head]):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return loop(given, model)


def tensor(given: Given) -> Callable[[int], float]:
    model, mesh = given.model, init_device_mesh("cpu", (RANKS,))
    pieces, whole = Shard(1), Replicate()
    rows = RowwiseParallel(output_layouts=pieces)
    into_whole = PrepareModuleInput(
        input_layouts=(pieces, None), desired_input_layouts=(whole, None), use_local_output=False
    )
    into_ffn = PrepareModuleInput(input_layouts=(pieces,), desired_input_layouts=(whole,), use_local_output=False)
    block = "decoder.blocks.*"
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
    plan = {
        "decoder.embedding": RowwiseParallel(input_layouts=whole, output_layouts=pieces),
        f"{block}.attention_norm": SequenceParallel(),
        f"{block}.attention": into_whole,
        **{f"{block}.attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        f"{block}.attention.out": rows,
        f"{block}.ffn_norm": SequenceParallel(),
        f"{block}.ffn": into_ffn,
        **{f"{block}.ffn.{name}": ColwiseParallel() for name in ("gate", "up")},
        f"{block}.ffn.down": rows,
        "decoder.norm": SequenceParallel(),
        "head": into_whole,
    }
    parallelize_module(model, mesh, plan)
    norms = [p for p in model.parameters() if p.ndim == 1]
    return loop(given, model, loss_parallel, lambda: sum_partial(norms, mesh))


@torch.no_grad()
def sum_partial(norms: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """A norm saw a piece of the sequence, so DTensor leaves its gradient a part of the sum. One collective for all."""
    flat = torch.cat([p.grad.to_local() for p in norms])
    dist.all_reduce(flat, group=mesh.get_group())
    for parameter, gradient in zip(norms, flat.split([p.numel() for p in norms]), strict=True):
        parameter.grad = DTensor.from_local(gradient, mesh, [Replicate()], run_check=False)


def loop(
    given: Given,
    model: nn.Module,
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
    sync: Callable[[], None] = nothing,
) -> Callable[[int], float]:
    optimizer = given.optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, given.share_of_peak)
    done, read = 0, float("nan")

    def run(steps: int) -> float:
        nonlocal done, read
        for _ in range(steps):
            tokens, labels = next(given.batches)
            with context():
                total, count = model(tokens, labels)
                loss = local(total) / count
                loss.backward()
            sync()
            torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if done % given.read_every == 0:
                read = loss.item()
            done += 1
        return read

    return run


def local(total: Tensor) -> Tensor:
    return total.to_local() if isinstance(total, DTensor) else total
