"""Shared by all tests: one thread a process, and a model small enough that a step costs milliseconds."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

from meshwright.config import RunConfig, load

torch.set_num_threads(1)
# Time is not a test, and a failure must be the same on the next run.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")

SMALL = [
    "--model.width=32",
    "--model.layers=2",
    "--model.ffn=48",
    "--data.sequence=16",
    "--data.kind=synthetic",
    "--data.samples=500",
    "--schedule.warmup=2",
    "--launch.device=cpu",
    "--launch.step_timeout=60",
]


def small_config(*overrides: str, steps: int = 6, ranks: int = 2) -> RunConfig:
    return load(overrides=[*SMALL, *overrides], steps=steps, ranks=ranks)


@pytest.fixture
def small():
    return small_config
