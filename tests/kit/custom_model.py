"""A custom model, loss and data source that are small enough for whole runs in a test."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from meshwright import train
from meshwright.base.config import BatchConfig, EvalConfig, LaunchConfig, LayoutConfig, RunConfig
from meshwright.base.records.events import Event, read_events
from meshwright.core.data.stream import Stream


class Points:
    """A source whose sample is its own index; some samples have a NaN loss, some cannot be decoded."""

    def __init__(self, nan=(), broken=()):
        self.nan, self.broken = nan, broken

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index in self.broken:
            raise RuntimeError(f"cannot read {index}")
        return np.full(4, math.nan if index in self.nan else index / 32, np.float32), index % 3


def summed_cross_entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def custom_config(steps: int = 4, ranks: int = 2, **sections) -> RunConfig:
    defaults = {
        "batch": BatchConfig(global_=8, micro=2),
        "eval": EvalConfig(holdout=0.0),
        "layout": LayoutConfig(replicate=ranks),
        "launch": LaunchConfig(device="cpu", collective_timeout=60.0),
    }
    return RunConfig(steps=steps, **(defaults | sections))


def custom_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def samples_of_step(step: int) -> list[int]:
    """The sample ids of a step of `custom_config` over `Points`, in global order."""
    return Stream.from_lengths(0, 8, [32], [1.0], 0.0).step(step).tolist()


def run(folder, config: RunConfig, **options):
    """Trains, and returns the result and rank 0's step records."""
    result = train(config, run=folder, quiet=True, **options)
    return result, step_records(folder)


def run_custom(folder, config: RunConfig, **options):
    defaults = {"model": custom_model(), "loss": summed_cross_entropy, "source": Points()}
    return run(folder, config, **(defaults | options))


def step_records(folder, rank: int = 0) -> list[Event]:
    return [e for e in read_events(folder / "events" / f"rank-{rank:05d}.jsonl") if e["kind"] == "step"]
