"""The loop as Lightning Fabric's own guide writes it."""

from __future__ import annotations

import torch

from benchmarks.ordinary import READ_EVERY, Run, adamw, loader_of, share_of_peak
from meshwright.models.init import build_model
from meshwright.parallel.world import World
from meshwright.trainer.loop import Job


def contender(job: Job, world: World) -> Run:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy

    config = job.config
    strategy = DDPStrategy(gradient_as_bucket_view=True)  # strategy="ddp" with the one option that all contenders set
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=world.size, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    assert fabric.world_size == world.size
    bare = build_model(config.model, config.seed)
    model, optimizer = fabric.setup(bare, adamw(bare, config.optimizer))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak(job))
    batches = iter(fabric.setup_dataloaders(loader_of(job)))
    done, read = 0, float("nan")

    def run(steps: int) -> float:
        nonlocal done, read
        for _ in range(steps):
            tokens, labels = next(batches)
            total, count = model(tokens, labels)
            loss = total / count
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=config.optimizer.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done % READ_EVERY == 0:
                read = loss.item()
        return read

    return run
