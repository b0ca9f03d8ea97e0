"""Recovery time: from a kill to the next completed step, relative to a cold start to the first step.

Each round launches `meshwright train`, kills one of its ranks during training, then kills the job and launches it
again. This process measures the time: it polls the event file of rank 0 every few milliseconds. A cold start finds
Python and torch in the page cache, as a relaunch does.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.throughput import ratio_statistics
from meshwright.base.records.events import Event, EventFollower
from meshwright.base.records.heartbeat import HeartbeatReading, process_start, read_heartbeat
from meshwright.base.records.run_folder import RunFolder

RANKS = 2
ROUNDS = 5
KILL_AT = 12
"""The kill follows once this step is recorded; the checkpoint of step 10, or of step 5, is published by then."""
TRAIN_OPTIONS = ("--steps", "60", "--checkpoint.every=5", "--checkpoint.seconds=0", "--launch.device=cpu")
POLL_SECONDS = 0.005
TIMEOUT_SECONDS = 120.0

COLD_START, RANK_KILLED, JOB_KILLED = "cold start", "one rank killed", "whole job killed"
MAX_RATIO = 1.3
"""Target: the largest ratio of the time from the kill of a rank to the next completed step to that of a cold start."""


def measure() -> dict[str, Any]:
    rounds = []
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix="meshwright-bench-", ignore_cleanup_errors=True) as folder:
            rounds.append(measure_round(Path(folder) / "run", number % RANKS))
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in rounds[-1].items())
        print(f"recovery: round {number + 1} of {ROUNDS}, seconds: {shown}", file=sys.stderr, flush=True)
    seconds = {name: [result[name] for result in rounds] for name in rounds[0]}
    return {
        "ranks": RANKS,
        "rounds": ROUNDS,
        "seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "ratio_to_cold_start": {
            name: ratio_statistics(seconds[COLD_START], values)
            for name, values in seconds.items()
            if name != COLD_START
        },
    }


def measure_round(root: Path, victim: int) -> dict[str, float]:
    """Seconds to the first completed step: of a cold start, after the kill of a rank, after the kill of the job."""
    job = TrainingProcess(root)
    try:
        start = job.launch()
        seconds = {COLD_START: job.wait_for_step(lambda step: step["attempt"] == 1) - start}
        job.wait_for_step(lambda step: step["step"] >= KILL_AT, checkpoint=True)
        last_step = job.last_step
        start = time.monotonic()
        os.kill(job.heartbeat(1, victim).pid, signal.SIGKILL)
        seconds[RANK_KILLED] = job.wait_for_step(lambda step: step["attempt"] == 2) - start
        seconds[f"{RANK_KILLED}, to the first new step"] = (
            job.wait_for_step(lambda step: step["step"] > last_step) - start
        )
        start = time.monotonic()
        job.kill()  # its ranks exit with it
        job.launch()
        seconds[JOB_KILLED] = job.wait_for_step(lambda step: step["attempt"] == 3) - start
        return seconds
    finally:
        job.end()


class TrainingProcess:
    """A training job seen from outside: its process, and the events of rank 0."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self.log = root.with_name("output.log")
        self.events = EventFollower(self.folder.events(0))
        self.pending: list[tuple[float, Event]] = []
        self.last_step = -1
        self.has_checkpoint = False
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self) -> float:
        """Launch the job and return the time of the launch."""
        start = time.monotonic()
        command = [sys.executable, "-m", "meshwright", "train", "--run", str(self.folder.root), "--ranks", str(RANKS)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*command, *TRAIN_OPTIONS], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        return start

    def wait_for_step(self, matches: Callable[[Event], bool], checkpoint: bool = False) -> float:
        """The time at which a matching step was recorded; with `checkpoint`, after a checkpoint is published."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            now = time.monotonic()
            self.pending += [(now, event) for event in self.events.new_events()]
            while self.pending:
                recorded, event = self.pending.pop(0)
                self.has_checkpoint |= event["kind"] == "checkpoint"
                if event["kind"] == "step":
                    self.last_step = event["step"]
                    if matches(event) and (self.has_checkpoint or not checkpoint):
                        return recorded
            assert self.process is not None
            if self.process.poll() is not None:
                break
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"the job stopped at step {self.last_step}:\n{self.log.read_text()[-2000:]}")

    def heartbeat(self, attempt: int, rank: int) -> HeartbeatReading:
        reading = read_heartbeat(self.folder.heartbeat(attempt, rank))
        assert reading is not None
        return reading

    def kill(self) -> None:
        """Kill the launched process and wait until it has exited."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Leave no process running that would disturb the next round."""
        if self.process is not None:
            self.kill()
        readings = [read_heartbeat(path) for path in self.folder.root.glob("attempts/*/heartbeat-*")]
        deadline = time.monotonic() + 10.0
        while any(reading and process_start(reading.pid) == reading.process_started for reading in readings):
            if time.monotonic() > deadline:
                for reading in readings:
                    with suppress(ProcessLookupError):
                        if reading and process_start(reading.pid) == reading.process_started:
                            os.kill(reading.pid, signal.SIGKILL)
                return
            time.sleep(POLL_SECONDS)
