"""From a kill to the next completed step, beside a cold start to the first: what a failure costs a whole run.

Each round launches `meshwright train` from nothing, kills one of its ranks in the middle of training, then the whole
job, and launches it again. Seconds are this process's: it polls rank 0's event file every few milliseconds. A cold
start finds Python and torch in the page cache, as the relaunch does.
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

from benchmarks.throughput import spread
from meshwright.telemetry.events import Event, EventFollower
from meshwright.telemetry.heartbeat import HeartbeatReading, process_start, read_heartbeat
from meshwright.telemetry.run_folder import RunFolder

RANKS = 2
ROUNDS = 5
KILL_AT = 12
"""The step that must be on record before the kill; the checkpoint of step 10 is published by then, or that of 5."""
WORDS = ("--steps", "60", "--checkpoint.every=5", "--checkpoint.seconds=0", "--launch.device=cpu")
POLL = 0.005
PATIENCE = 120.0

COLD, RANK, JOB = "cold start", "one rank killed", "whole job killed"
MOST = 1.3
"""The most that the seconds from a rank's kill to the next completed step may be of a cold start's to the first."""


def measure() -> dict[str, Any]:
    rounds = []
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix="meshwright-bench-", ignore_cleanup_errors=True) as folder:
            rounds.append(one_round(Path(folder) / "run", number % RANKS))
        shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in rounds[-1].items())
        print(f"recovery: round {number + 1} of {ROUNDS}, seconds: {shown}", file=sys.stderr, flush=True)
    seconds = {name: [one[name] for one in rounds] for name in rounds[0]}
    return {
        "ranks": RANKS,
        "rounds": ROUNDS,
        "seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()},
        "ratio_to_cold_start": {
            name: spread(seconds[COLD], values) for name, values in seconds.items() if name != COLD
        },
    }


def one_round(root: Path, victim: int) -> dict[str, float]:
    """Seconds to the first completed step: of a cold start, after a rank's kill, after the whole job's."""
    job = Job(root)
    try:
        start = job.launch()
        seconds = {COLD: job.until(lambda step: step["attempt"] == 1) - start}
        job.until(lambda step: step["step"] >= KILL_AT, checkpoint=True)
        before = job.last
        start = time.monotonic()
        os.kill(job.heartbeat(1, victim).pid, signal.SIGKILL)
        seconds[RANK] = job.until(lambda step: step["attempt"] == 2) - start
        seconds[f"{RANK}, until new ground"] = job.until(lambda step: step["step"] > before) - start
        start = time.monotonic()
        job.kill()  # its ranks die with it
        job.launch()
        seconds[JOB] = job.until(lambda step: step["attempt"] == 3) - start
        return seconds
    finally:
        job.end()


class Job:
    """A training job seen from outside: its process, and what rank 0 puts on record."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self.log = root.with_name("output.log")
        self.events = EventFollower(self.folder.events(0))
        self.waiting: list[tuple[float, Event]] = []
        self.last = -1
        self.saved = False
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self) -> float:
        """When it was launched."""
        start = time.monotonic()
        words = [sys.executable, "-m", "meshwright", "train", "--run", str(self.folder.root), "--ranks", str(RANKS)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([*words, *WORDS], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        return start

    def until(self, wanted: Callable[[Event], bool], checkpoint: bool = False) -> float:
        """When a step that is wanted was seen on record; with `checkpoint`, not before one was published."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            now = time.monotonic()
            self.waiting += [(now, event) for event in self.events.new_events()]
            while self.waiting:
                seen, event = self.waiting.pop(0)
                self.saved |= event["kind"] == "checkpoint"
                if event["kind"] == "step":
                    self.last = event["step"]
                    if wanted(event) and (self.saved or not checkpoint):
                        return seen
            assert self.process is not None
            if self.process.poll() is not None:
                break
            time.sleep(POLL)
        raise RuntimeError(f"the job came no further than step {self.last}:\n{self.log.read_text()[-2000:]}")

    def heartbeat(self, attempt: int, rank: int) -> HeartbeatReading:
        page = read_heartbeat(self.folder.heartbeat(attempt, rank))
        assert page is not None
        return page

    def kill(self) -> None:
        """The process that the user started, and is gone when this returns."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Leaves no process behind to disturb the next round."""
        if self.process is not None:
            self.kill()
        pages = [read_heartbeat(path) for path in self.folder.root.glob("attempts/*/heartbeat-*")]
        end = time.monotonic() + 10.0
        while any(page and process_start(page.pid) == page.started for page in pages):
            if time.monotonic() > end:
                for page in pages:
                    with suppress(ProcessLookupError):
                        if page and process_start(page.pid) == page.started:
                            os.kill(page.pid, signal.SIGKILL)
                return
            time.sleep(POLL)
