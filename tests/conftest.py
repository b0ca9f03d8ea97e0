"""Shared by all tests: one thread a process, no home but a test's own, and a model whose steps cost milliseconds."""

from __future__ import annotations

import os
import tempfile
from itertools import count

os.environ["OMP_NUM_THREADS"] = "1"
# What a machine knows of itself is no test's business: also for processes that tests start, and before any test runs.
os.environ["MESHWRIGHT_HOME"] = os.path.join(tempfile.gettempdir(), f"meshwright-no-home-{os.getpid()}")

import pytest
import torch
from hypothesis import settings
from small_run import small_config

torch.set_num_threads(1)
# Time is not a test, and a failure must be the same on the next run.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")


NUMBERS = count()


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """A home of its own for every test, in which nothing was measured."""
    folder = tmp_path_factory.getbasetemp() / "homes" / str(next(NUMBERS))
    monkeypatch.setenv("MESHWRIGHT_HOME", str(folder))
    return folder


@pytest.fixture
def small():
    return small_config
