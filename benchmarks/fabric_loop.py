"""The training loop of Lightning Fabric, as in its guide."""

from __future__ import annotations

import torch

from benchmarks.peer_components import READ_LOSS_EVERY, RunSteps, lr_multiplier, make_adamw, make_loader
from meshwright.core.models.init import build_model
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job


def make_loop(job: Job, world: World) -> RunSteps:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy

    config = job.config
    strategy = DDPStrategy(gradient_as_bucket_view=True)  # strategy="ddp" with the one option that all peers set
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=world.size, plugins=[TorchElasticEnvironment()])
    fabric.launch()
    assert fabric.world_size == world.size
    plain_model = build_model(config.model, config.seed)
    model, optimizer = fabric.setup(plain_model, make_adamw(plain_model, config.optimizer))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_multiplier(job))
    batches = iter(fabric.setup_dataloaders(make_loader(job)))
    done, last_loss = 0, float("nan")

    def run(steps: int) -> float:
        nonlocal done, last_loss
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
            if done % READ_LOSS_EVERY == 0:
                last_loss = loss.item()
        return last_loss

    return run
