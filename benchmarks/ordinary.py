"""The parts that every peer's loop shares: an ordinary dataset and loader, AdamW, and a schedule for LambdaLR."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from meshwright.config import OptimizerConfig
from meshwright.data.source import Source
from meshwright.optim.schedule import learning_rate
from meshwright.trainer.loop import Job

READ_EVERY = 10
"""Steps between two readings of the loss, as an ordinary loop logs it."""

Run = Callable[[int], float]
"""Trains so many steps more, and gives the last loss that was read."""


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, labels = self.source[index]
        return torch.from_numpy(tokens), torch.from_numpy(labels)


def loader_of(job: Job, sampler: Sampler[int] | None = None) -> DataLoader[tuple[Tensor, Tensor]]:
    """Without a sampler it shuffles by itself, for a peer that puts a distributed sampler in."""
    samples = Samples(job.sources[0])
    return DataLoader(samples, job.batch.micro, shuffle=sampler is None, sampler=sampler, drop_last=True)


def adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """The groups that Meshwright makes: no decay on norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def share_of_peak(job: Job, counts_a_step: int = 1) -> Callable[[int], float]:
    """For LambdaLR, which multiplies the peak; some count more than once a step."""
    config = job.config
    return lambda count: learning_rate(count // counts_a_step, config.steps, 1.0, config.schedule)
