"""Tests the goodput account of a real run that is killed: it adds up to the wall time that the test measures."""

from __future__ import annotations

import time

import pytest

from meshwright import train
from meshwright.base.history.goodput import goodput
from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.run_folder import RunFolder
from tests.kit.small_run import small_config

KILLS = 10
STEPS = 120


@pytest.mark.long
def test_account_of_a_run_killed_ten_times_adds_up_to_its_wall_time(tmp_path, monkeypatch):
    kills = [f"step.forward:rank1:kill@step{10 * kill + 10}#{kill}" for kill in range(KILLS)]
    monkeypatch.setenv("MESHWRIGHT_FAULT", ",".join([f"step.fetch:slow=0.5x{KILLS + 1}", *kills]))
    config = small_config("--checkpoint.every=4", "--checkpoint.seconds=0", "--eval.every=50", steps=STEPS)
    began = time.time()
    train(config, run=tmp_path / "run", quiet=True)
    ended = time.time()
    history = RunHistory(RunFolder(tmp_path / "run"))
    account = goodput(history, ended)
    print({part: round(seconds, 3) for part, seconds in account.parts.items()}, ended - began, account.wall_seconds)
    assert len(history.attempts) == KILLS + 1
    assert account.wall_seconds == pytest.approx(ended - began, rel=1e-3)
    assert sum(account.nanoseconds.values()) == account.wall_nanoseconds
    assert account.unique_samples == STEPS * 16
    parts = account.parts
    assert parts["data"] > 0.45 * STEPS
    assert parts["lost work"] > 0
    assert parts["restart"] > 0
    assert parts["idle"] == parts["stalled"] == parts["skipped"] == 0
