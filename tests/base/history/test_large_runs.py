"""Tests that a run of 10^5 steps on 64 ranks opens within bounds of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kit.recorded_history import RecordedRun

OPEN = """
import json, resource, sys, time
from pathlib import Path
from meshwright.base.history.goodput import goodput
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.signals import read_signals
from meshwright.base.records.run_folder import RunFolder

began = time.process_time()
history = RunHistory(RunFolder(Path(sys.argv[1])))
opened = time.process_time() - began
account = goodput(history, 2e9)
read_signals(history, 2e9, account)
accounted = time.process_time() - began - opened
history.update()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
rows = {rank: len(history.steps(rank)) for rank in history.ranks}
print(json.dumps({"opened": opened, "accounted": accounted, "peak": peak, "rows": list(rows.values())}))
"""


def open_run(folder):
    """Opens a run in a process of its own: processor seconds, peak memory, and rows by rank."""
    completed = subprocess.run([sys.executable, "-c", OPEN, str(folder)], capture_output=True, timeout=120, check=True)
    return json.loads(completed.stdout)


@pytest.mark.long
def test_a_run_of_100_000_steps_on_64_ranks_opens_in_less_than_500_mb(tmp_path):
    run = RecordedRun(tmp_path / "run", ranks=1, steps=100_000)
    run.start()
    run.step(0)
    content = run.folder.events(0).read_text().splitlines()
    template = json.loads(content[-1])
    with run.folder.events(0).open("a") as file:
        for step in range(1, 100_000):
            template |= {"step": step, "begin": run.now + 0.1 * step, "time": run.now + 0.1 * step + 0.1}
            file.write(json.dumps(template, separators=(",", ":")) + "\n")
    for rank in range(1, 64):
        os.link(run.folder.events(0), run.folder.events(rank))
    opened = open_run(run.root)
    print(opened)
    assert opened["rows"][0] == 100_000
    assert len(opened["rows"]) == 64
    assert min(opened["rows"]) >= 2048
    assert opened["peak"] < 500e6
