"""Hand-written torch training loops for each layout: DDP, FSDP2, and tensor with sequence parallelism by DTensor.

Only the model comes from Meshwright. Each loop follows the documentation of torch, with two common optimizations: q, k
and v share one all-gather, and the gradients of all norms share one all-reduce.
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

from meshwright.core.models.layers.decoder import LanguageModel

RANKS = 2


@dataclass(frozen=True)
class LoopInputs:
    """The inputs that both sides of the comparison share."""

    model: LanguageModel
    """The unsharded model with its initial weights."""
    batches: Iterator[list[Tensor]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    lr_multiplier: Callable[[int], float]
    clip: float
    read_loss_every: int


def no_op() -> None:
    pass


def ddp(inputs: LoopInputs) -> Callable[[int], float]:
    return train_loop(inputs, DistributedDataParallel(inputs.model, gradient_as_bucket_view=True))


def fsdp(inputs: LoopInputs, reshard_after_forward: bool) -> Callable[[int], float]:
    """FSDP2 with the units of Meshwright: one per block, one for the embedding, one for norm and head."""
    model, mesh = inputs.model, init_device_mesh("cpu", (RANKS,))
    decoder = model.decoder
    for unit in ([decoder.embedding], *([block] for block in decoder.blocks), [decoder.norm, model.head]):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return train_loop(inputs, model)


def tensor(inputs: LoopInputs) -> Callable[[int], float]:
    model, mesh = inputs.model, init_device_mesh("cpu", (RANKS,))
    sequence_shard, replicated = Shard(1), Replicate()
    rowwise = RowwiseParallel(output_layouts=sequence_shard)
    gather_sequence = PrepareModuleInput(
        input_layouts=(sequence_shard, None), desired_input_layouts=(replicated, None), use_local_output=False
    )
    gather_ffn_input = PrepareModuleInput(
        input_layouts=(sequence_shard,), desired_input_layouts=(replicated,), use_local_output=False
    )
    block = "decoder.blocks.*"
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
    plan = {
        "decoder.embedding": RowwiseParallel(input_layouts=replicated, output_layouts=sequence_shard),
        f"{block}.attention_norm": SequenceParallel(),
        f"{block}.attention": gather_sequence,
        **{f"{block}.attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        f"{block}.attention.out": rowwise,
        f"{block}.ffn_norm": SequenceParallel(),
        f"{block}.ffn": gather_ffn_input,
        **{f"{block}.ffn.{name}": ColwiseParallel() for name in ("gate", "up")},
        f"{block}.ffn.down": rowwise,
        "decoder.norm": SequenceParallel(),
        "head": gather_sequence,
    }
    parallelize_module(model, mesh, plan)
    norms = [p for p in model.parameters() if p.ndim == 1]
    return train_loop(inputs, model, loss_parallel, lambda: all_reduce_gradients(norms, mesh))


@torch.no_grad()
def all_reduce_gradients(norms: list[nn.Parameter], mesh: DeviceMesh) -> None:
    """Sum the gradients of the norms over ranks, in one all-reduce: each rank applied them to its sequence chunk."""
    flat = torch.cat([p.grad.to_local() for p in norms])
    dist.all_reduce(flat, group=mesh.get_group())
    for parameter, gradient in zip(norms, flat.split([p.numel() for p in norms]), strict=True):
        parameter.grad = DTensor.from_local(gradient, mesh, [Replicate()], run_check=False)


def train_loop(
    inputs: LoopInputs,
    model: nn.Module,
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
    sync: Callable[[], None] = no_op,
) -> Callable[[int], float]:
    optimizer = inputs.optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, inputs.lr_multiplier)
    done, last_loss = 0, float("nan")

    def run(steps: int) -> float:
        nonlocal done, last_loss
        for _ in range(steps):
            tokens, labels = next(inputs.batches)
            with context():
                total, count = model(tokens, labels)
                loss = local_tensor(total) / count
                loss.backward()
            sync()
            torch.nn.utils.clip_grad_norm_(model.parameters(), inputs.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if done % inputs.read_loss_every == 0:
                last_loss = loss.item()
            done += 1
        return last_loss

    return run


def local_tensor(total: Tensor) -> Tensor:
    return total.to_local() if isinstance(total, DTensor) else total
