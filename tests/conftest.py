"""Shared by all tests: one thread a process, and a model small enough that a step costs milliseconds."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings
from small_run import small_config

torch.set_num_threads(1)
# Time is not a test, and a failure must be the same on the next run.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")


@pytest.fixture
def small():
    return small_config
