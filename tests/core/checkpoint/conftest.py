"""Fixtures of the checkpoint tests: silence DCP, split a shard into several writes, and a simulated disk."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from meshwright.base.store.posix import PosixSink
from tests.core.checkpoint.checkpoint_fixtures import save
from tests.core.checkpoint.simulated_disk import SimulatedDisk, open_store


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:  # these tests run DCP in one process
            item.add_marker(pytest.mark.filterwarnings("ignore:torch.distributed is disabled"))


@pytest.fixture(autouse=True)
def quiet_dcp(monkeypatch):
    """DCP logs a stack trace for every failed save, and these tests make thousands fail."""
    for name in list(logging.root.manager.loggerDict):
        if "dcp_logger" in name:
            monkeypatch.setattr(logging.getLogger(name), "disabled", True)


@pytest.fixture
def small_writes(monkeypatch):
    monkeypatch.setattr(PosixSink, "BLOCK_BYTES", 256)


@pytest.fixture
def disk(small_writes):
    """A simulated disk with a durable checkpoint of step 1."""
    disk = SimulatedDisk()
    save(1, open_store(disk))
    return disk.crash(1)
