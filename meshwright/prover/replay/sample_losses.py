"""The loss of every sample of a step by itself, on the weights before the step, on any layout."""

from __future__ import annotations

import torch

from meshwright.core.parallel.parallel_model import unchanged_module
from meshwright.core.trainer.loop import Training
from meshwright.core.trainer.objective import find_objective


@torch.no_grad()
def sample_losses(training: Training, step: int) -> list[tuple[int, float, int]]:
    """(sample id, mean loss, valid targets) of every sample of the step in global order, equal on every rank.

    Every rank runs as many passes as any other, because a pass may be collective. As in an evaluation, dropout is off,
    and the state of the training does not change.
    """
    world, model, context, batch = training.world, training.parallel_model, training.step.context, training.job.batch
    objective, dataset = find_objective(model.module), training.evaluation.dataset
    sums = torch.zeros(2, batch.global_, dtype=torch.float64, device=world.device)
    modes = [(child, child.training) for child in model.module.modules()]
    model.module.eval()
    first = context.data_coordinate * batch.local
    ids = training.stream.local_samples(step, context.data_coordinate, batch.replicas)
    with unchanged_module(model.module):
        model.broadcast_buffers()
        for position in range(batch.local):
            world.heartbeat.beat()
            sample = dataset[ids[position : position + 1]]
            with training.precision.autocast(), model.micro_step(last=True):
                loss = model.forward_loss(*map(world.to_device, model.shard_inputs(sample.tensors)))
            if context.reports_loss:
                sums[0, first + position] += loss.double()
            if context.counts_tokens:
                sums[1, first + position] += sample.valid_targets
    model.reshard()
    training.step.expert_balancer.discard_loads()
    if objective is not None:
        objective.measured.clear()
    for child, mode in modes:
        child.training = mode
    losses, targets = world.all_reduce(sums, "sample losses").wait().tolist()
    samples = training.stream.step(step).tolist()
    return [
        (sample, loss / max(1.0, count), int(count))
        for sample, loss, count in zip(samples, losses, targets, strict=True)
    ]
