"""What the loops of all peers share: a torch dataset and DataLoader, AdamW, and a schedule for LambdaLR."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from meshwright.base.config import OptimizerConfig
from meshwright.core.data.source import Source
from meshwright.core.optim.schedule import learning_rate
from meshwright.core.trainer.job import Job

READ_LOSS_EVERY = 10
"""Steps between two reads of the loss, as in a typical loop that logs it."""

RunSteps = Callable[[int], float]
"""Trains the given number of steps and returns the last loss that was read."""


class SampleDataset(Dataset[tuple[Tensor, Tensor]]):
    """A source of Meshwright as a torch dataset."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, labels = self.source[index]
        return torch.from_numpy(tokens), torch.from_numpy(labels)


def make_loader(job: Job, sampler: Sampler[int] | None = None) -> DataLoader[tuple[Tensor, Tensor]]:
    """A DataLoader. Without a sampler it shuffles, for a peer that inserts its own distributed sampler."""
    samples = SampleDataset(job.sources[0])
    return DataLoader(samples, job.batch.micro, shuffle=sampler is None, sampler=sampler, drop_last=True)


def make_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with the parameter groups of Meshwright: no weight decay on norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def lr_multiplier(job: Job, counts_per_step: int = 1) -> Callable[[int], float]:
    """The factor of the peak learning rate for LambdaLR; some peers call the scheduler more than once per step."""
    config = job.config
    return lambda count: learning_rate(count // counts_per_step, config.steps, 1.0, config.schedule)
