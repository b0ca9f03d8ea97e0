"""The training loop of Hugging Face accelerate, as in its guide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.peer_components import READ_LOSS_EVERY, RunSteps, lr_multiplier, make_adamw, make_loader
from meshwright.core.models.init import build_model
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job

ComputeLoss = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> the mean loss of the rank's batch."""


def make_loop(job: Job, world: World) -> RunSteps:
    return train_with_accelerate(
        job, world, build_model(job.config.model, job.config.seed), make_loader(job), mean_loss
    )


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    total, count = model(*batch)
    return total / count  # type: ignore[no-any-return]


def train_with_accelerate(
    job: Job, world: World, plain_model: nn.Module, plain_loader: DataLoader[Any], compute_loss: ComputeLoss
) -> RunSteps:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    config = job.config
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    assert accelerator.num_processes == world.size
    plain_optimizer = make_adamw(plain_model, config.optimizer)
    # accelerate calls the scheduler once per process at each step
    plain_scheduler = torch.optim.lr_scheduler.LambdaLR(plain_optimizer, lr_multiplier(job, world.size))
    model, optimizer, loader, scheduler = accelerator.prepare(
        plain_model, plain_optimizer, plain_loader, plain_scheduler
    )
    batches = iter(loader)
    done, last_loss = 0, float("nan")

    def run(steps: int) -> float:
        nonlocal done, last_loss
        for _ in range(steps):
            loss = compute_loss(model, next(batches))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), config.optimizer.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done % READ_LOSS_EVERY == 0:
                last_loss = loss.item()
        return last_loss

    return run
