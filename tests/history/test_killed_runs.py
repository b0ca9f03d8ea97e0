"""Tests the goodput account of real runs that are killed: it adds up to the wall time that another process measures."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from small_run import SMALL

from meshwright.history.goodput import goodput
from meshwright.history.run_history import RunHistory
from meshwright.telemetry.run_folder import RunFolder

KILLS = 10


@pytest.mark.long
@pytest.mark.timeout(600)
def test_account_of_a_run_killed_ten_times_adds_up_to_its_wall_time(tmp_path):
    kills = [f"step.forward:rank1:kill@step{10 * kill + 10}#{kill}" for kill in range(KILLS)]
    # Steps of 1 s: the interpreter's own exit, which no record can contain, takes up to 0.2 s on a busy machine.
    faults = ",".join(["step.fetch:slow=1x11", *kills])
    command = [sys.executable, "-m", "meshwright", "train", *SMALL, "--steps=120", "--checkpoint.every=4", "--ranks=2"]
    command += ["--checkpoint.seconds=0"]
    began = time.time()
    completed = subprocess.run(
        [*command, "--run", str(tmp_path / "run")],
        env=os.environ | {"MESHWRIGHT_FAULT": faults},
        stdout=subprocess.DEVNULL,
        timeout=600,
    )
    ended = time.time()
    assert completed.returncode == 0
    history = RunHistory(RunFolder(tmp_path / "run"))
    account = goodput(history, ended)
    print({part: round(seconds, 3) for part, seconds in account.parts.items()}, ended - began, account.wall_seconds)
    assert len(history.attempts) == KILLS + 1
    assert account.wall_seconds == pytest.approx(ended - began, rel=1e-3)
    assert sum(account.nanoseconds.values()) == account.wall_nanoseconds
    assert account.unique_samples == 120 * 16
    assert account.parts["lost work"] > 0
    assert account.parts["restart"] > account.parts["start"]
    assert account.parts["data"] > 120 * 0.95
    assert account.parts["idle"] == 0
