"""A hand-written torch training loop: DDP, DistributedSampler, AdamW and LambdaLR."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from benchmarks.peer_components import READ_LOSS_EVERY, RunSteps, SampleDataset, lr_multiplier, make_adamw, make_loader
from meshwright.core.models.init import build_model
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job


def make_loop(job: Job, world: World) -> RunSteps:
    config = job.config
    model = DistributedDataParallel(build_model(config.model, config.seed), gradient_as_bucket_view=True)
    optimizer = make_adamw(model, config.optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_multiplier(job))
    sampler = DistributedSampler(
        SampleDataset(job.sources[0]), world.size, world.rank, seed=config.seed, drop_last=True
    )
    batches = iter(make_loader(job, sampler))
    done, last_loss = 0, float("nan")

    def run(steps: int) -> float:
        nonlocal done, last_loss
        for _ in range(steps):
            tokens, labels = next(batches)
            total, count = model(tokens, labels)
            loss = total / count
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done % READ_LOSS_EVERY == 0:
                last_loss = loss.item()
        return last_loss

    return run
