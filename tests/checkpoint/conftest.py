"""Shared by the tests of checkpoints: DCP is quiet, and a shard can be made to be several writes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from simulated_disk import SimulatedDisk, store_on
from small_checkpoints import save

from meshwright.store.posix import PosixSink


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:  # one process alone is what these tests want
            item.add_marker(pytest.mark.filterwarnings("ignore:torch.distributed is disabled"))


@pytest.fixture(autouse=True)
def quiet_dcp(monkeypatch):
    """It formats every stack trace of a save that was broken on purpose, and there are thousands."""
    for name in list(logging.root.manager.loggerDict):
        if "dcp_logger" in name:
            monkeypatch.setattr(logging.getLogger(name), "disabled", True)


@pytest.fixture
def small_writes(monkeypatch):
    monkeypatch.setattr(PosixSink, "BUFFER_BYTES", 256)


@pytest.fixture
def disk(small_writes):
    """A run's disk with the checkpoint of step 1 on it, all of it durable."""
    disk = SimulatedDisk()
    save(1, store_on(disk))
    return disk.crash(1)
