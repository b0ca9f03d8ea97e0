"""A hand-written loop on plain torch: DDP, DistributedSampler, AdamW, LambdaLR."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from benchmarks.ordinary import READ_EVERY, Run, Samples, adamw, loader_of, share_of_peak
from meshwright.models.init import build_model
from meshwright.parallel.world import World
from meshwright.trainer.loop import Job


def contender(job: Job, world: World) -> Run:
    config = job.config
    model = DistributedDataParallel(build_model(config.model, config.seed), gradient_as_bucket_view=True)
    optimizer = adamw(model, config.optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak(job))
    sampler = DistributedSampler(Samples(job.sources[0]), world.size, world.rank, seed=config.seed, drop_last=True)
    batches = iter(loader_of(job, sampler))
    done, read = 0, float("nan")

    def run(steps: int) -> float:
        nonlocal done, read
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
            if done % READ_EVERY == 0:
                read = loss.item()
        return read

    return run
