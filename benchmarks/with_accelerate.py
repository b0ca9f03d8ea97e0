"""The loop as accelerate's own guide writes it."""

from __future__ import annotations

import torch

from benchmarks.ordinary import READ_EVERY, Run, adamw, loader_of, share_of_peak
from meshwright.models.init import build_model
from meshwright.parallel.world import World
from meshwright.trainer.loop import Job


def contender(job: Job, world: World) -> Run:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    config = job.config
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    assert accelerator.num_processes == world.size
    bare = build_model(config.model, config.seed)
    bare_optimizer = adamw(bare, config.optimizer)
    # accelerate's scheduler counts once for every process at each step
    bare_scheduler = torch.optim.lr_scheduler.LambdaLR(bare_optimizer, share_of_peak(job, world.size))
    model, optimizer, loader, scheduler = accelerator.prepare(bare, bare_optimizer, loader_of(job), bare_scheduler)
    batches = iter(loader)
    done, read = 0, float("nan")

    def run(steps: int) -> float:
        nonlocal done, read
        for _ in range(steps):
            tokens, labels = next(batches)
            total, count = model(tokens, labels)
            loss = total / count
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), config.optimizer.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done % READ_EVERY == 0:
                read = loss.item()
        return read

    return run
