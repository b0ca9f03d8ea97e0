"""Lab: a pipeline with the 1F1B schedule. The reference solution."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def schedule(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """The warm-up fills the stages behind this one; then one forward and one backward alternate."""
    warm_up = min(stages - stage - 1, micro_batches)
    order = [("F", i) for i in range(warm_up)]
    for i in range(warm_up, micro_batches):
        order += [("F", i), ("B", i - warm_up)]
    return order + [("B", i) for i in range(micro_batches - warm_up, micro_batches)]


def pipeline_step(
    module: nn.Module,
    inputs: list[Tensor],
    targets: list[Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, ...],
) -> list[Tensor]:
    """Runs the schedule of this stage. Sends are never waited for before the end: neighbours send to each other."""
    stage, stages = dist.get_rank(), dist.get_world_size()
    first, last = stage == 0, stage == stages - 1
    alive: dict[int, tuple[Tensor, Tensor]] = {}
    losses: list[Tensor] = []
    sends: list[Any] = []
    for action, i in schedule(stage, stages, len(inputs)):
        if action == "F":
            received = inputs[i] if first else receive(shape, stage - 1).requires_grad_()
            output = module(received)
            if last:
                output = loss(output, targets[i])
                losses.append(output.detach())
            else:
                sends.append(dist.isend(output.detach(), stage + 1))
            alive[i] = received, output
        else:
            received, output = alive.pop(i)  # the activations of this micro-batch are free after its backward
            output.backward(None if last else receive(shape, stage + 1))
            if not first and received.grad is not None:
                sends.append(dist.isend(received.grad, stage - 1))
            del received, output
    for work in sends:
        work.wait()
    return losses


def receive(shape: tuple[int, ...], peer: int) -> Tensor:
    tensor = torch.empty(shape, dtype=torch.float64)
    dist.recv(tensor, peer)
    return tensor
