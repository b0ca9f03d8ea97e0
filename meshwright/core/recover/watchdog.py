"""The watchdog: finds the rank that hangs and the ranks that are slow, from heartbeats and /proc alone. Torch-free.

A rank that waits for others is never the cause of a hang. The watchdog names the rank that the others wait for: it is
stopped, busy, asleep, or has entered another collective than the rest.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path

from meshwright.base.io import open_regular_file
from meshwright.base.records.heartbeat import HeartbeatReading, process_stat
from meshwright.base.records.incidents import read_heartbeats
from meshwright.base.records.phases import STEP_PHASES
from meshwright.base.records.run_folder import RunFolder

LOCAL_PHASES = tuple(phase for phase in (*STEP_PHASES, "save") if phase != "sync")
"""Phases whose duration depends on the rank itself; in `sync` the rank waits for others."""
BUSY_SHARE, RUNNABLE_SHARE = 0.5, 0.05
"""The share of the time without progress that a busy process has used a processor for: in general, and if it is
runnable.
"""
STARTUP_FACTOR = 10
"""A rank may take this many times the hang timeout to build the model and to run the warm-up backward."""
STRAGGLER_WINDOW = 20
"""Steps over which the ranks are compared."""
FORK_SERVER = -1
"""The rank of a hang in the process that forks the ranks."""


@dataclass(frozen=True)
class Hang:
    """A rank that makes no progress."""

    rank: int
    """The rank, or -1 for the fork server."""
    message: str
    stack: str
    heartbeats: dict[int, HeartbeatReading]
    """The heartbeat of every rank when the hang was found."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others."""

    rank: int
    step: int
    phase: str
    factor: float
    """The rank's time in its local phases, divided by the median of the others."""
    seconds: float
    """The excess time per step in `phase`."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: {self.factor:.1f} times the others over the last {STRAGGLER_WINDOW} steps, "
            f"most of it in {self.phase} ({self.seconds * 1e3:.0f} ms more per step)"
        )


class Watchdog:
    """Compares the heartbeats of an attempt with the ones that it read before; decides by its own monotonic clock."""

    def __init__(
        self,
        folder: RunFolder,
        attempt: int,
        hang_timeout: float,
        straggler_ratio: float,
        launcher_pid: int = 0,
        start_timeout: float = float("inf"),
        read: Callable[[], dict[int, HeartbeatReading]] | None = None,
    ) -> None:
        """`read` returns the heartbeats of all ranks; by default those of this host, from the run folder."""
        self.folder, self.attempt = folder, attempt
        self.read = read or partial(read_heartbeats, folder, attempt)
        self.hang_timeout, self.straggler_ratio = hang_timeout, straggler_ratio
        self.launcher_pid, self.start_timeout = launcher_pid, start_timeout
        self.started = time.monotonic()
        self.last_beats: dict[int, tuple[int, float]] = {}
        """rank -> (beat counter, when it last advanced)"""
        self.cpu_ticks: dict[int, int] = {}
        """rank -> processor ticks that its process had used when the beat counter last advanced"""
        self.stack_checks: dict[int, tuple[int, float, bool]] = {}
        """rank -> (beat counter, when the stack was dumped, whether the stack ends in a collective)"""
        self.window_start: dict[int, HeartbeatReading] = {}
        self.heartbeats: dict[int, HeartbeatReading] = {}
        """the heartbeats that the last check has read"""
        self.all_ended_since = float("inf")

    def check(self) -> tuple[Hang | None, list[Straggler], int]:
        """Returns the hang, the stragglers, and the number of a signal that a rank has received (0 if none)."""
        self.heartbeats = heartbeats = self.read()
        now = time.monotonic()
        running = {rank: heartbeat for rank, heartbeat in heartbeats.items() if heartbeat.phase != "end"}
        self.all_ended_since = min(self.all_ended_since, now) if heartbeats and not running else float("inf")
        if not heartbeats:
            return self.find_launcher_hang(now), [], 0
        if now - self.all_ended_since > self.hang_timeout:
            message = f"every rank has ended, but the fork server has not reported the result: {self.launcher_state()}"
            return Hang(FORK_SERVER, message, "", heartbeats), [], 0
        for rank, heartbeat in running.items():
            if rank not in self.last_beats or self.last_beats[rank][0] != heartbeat.beats:
                self.last_beats[rank] = (heartbeat.beats, now)
                self.cpu_ticks[rank] = int(heartbeat.stat.get("ticks", 0))
        signal_number = next((heartbeat.signal for heartbeat in running.values() if heartbeat.signal), 0)
        return self.find_hang(running, now), self.find_stragglers(running), signal_number

    def find_launcher_hang(self, now: float) -> Hang | None:
        """A fork server that has not started a rank. While its process is not stopped it may be importing torch or
        opening the data, which can take long.
        """
        seconds, stopped = now - self.started, is_stopped(self.launcher_pid)
        if seconds <= (self.start_timeout if stopped else self.hang_timeout * STARTUP_FACTOR):
            return None
        limit = "launch.rendezvous_timeout" if stopped else f"{STARTUP_FACTOR} x launch.hang_timeout"
        advice = "" if stopped else "; it imports torch and opens the data: try a longer launch.hang_timeout"
        message = f"the fork server has not started a rank within {seconds:.1f} s ({limit}): {self.launcher_state()}"
        message += advice
        return Hang(FORK_SERVER, message, "", {})

    def launcher_state(self) -> str:
        stat = process_stat(self.launcher_pid)
        if not stat:
            return f"its process {self.launcher_pid} is gone"
        return f"its process {self.launcher_pid} is {'stopped' if is_stopped(self.launcher_pid) else 'not stopped'}"

    def find_hang(self, heartbeats: dict[int, HeartbeatReading], now: float) -> Hang | None:
        idle_seconds = {rank: now - self.last_beats[rank][1] for rank in heartbeats}
        # A single rank can hang while the others still advance towards the next collective.
        stuck = [
            rank
            for rank, heartbeat in heartbeats.items()
            if idle_seconds[rank] > self.hang_timeout * (STARTUP_FACTOR if is_starting(heartbeat) else 1)
        ]
        if not stuck:
            return None
        waiting = {rank for rank in stuck if is_waiting(heartbeats[rank])}
        # Collectives inside forward and backward do not appear in the heartbeat: the stack shows who waits in one.
        waiting |= {rank for rank in stuck if rank not in waiting and self.waits_inside(rank, heartbeats[rank], now)}
        if len(waiting) == len(heartbeats):
            # Between two passes of a pipeline a rank is in `sync` in any case: again the stack decides.
            in_wait = {
                rank for rank in waiting if heartbeats[rank].waiting or self.waits_inside(rank, heartbeats[rank], now)
            }
            waiting = in_wait or waiting
        if len(waiting) == len(stuck) < len(heartbeats):
            return None  # the stuck ranks wait for a rank that still advances
        rank = pick_suspect(heartbeats, stuck, waiting)
        mismatch = find_collective_mismatch(heartbeats)
        rank = rank if mismatch is None else mismatch[0]
        heartbeat = heartbeats[rank]
        others = sorted(
            {
                other.collective if is_waiting(other) else other.phase
                for other_rank, other in heartbeats.items()
                if other_rank in waiting and other_rank != rank
            }
        )
        state = self.process_state(heartbeat, self.cpu_ticks.get(rank, 0))
        message = f"rank {rank} has made no progress for {idle_seconds[rank]:.1f} s: {state}, {heartbeat.location}"
        if mismatch is not None:
            message = mismatch[1]
        elif others:
            message += f"; the other ranks wait in {', '.join(others)}"
        stack = dump_stack(heartbeat, self.folder.log(self.attempt, rank))
        return Hang(rank, message, stack, heartbeats)

    def waits_inside(self, rank: int, heartbeat: HeartbeatReading, now: float) -> bool:
        """Whether the rank's stack ends in a collective. While the rank does not advance, its stack is dumped at most
        once per hang timeout.
        """
        if heartbeat.is_stopped:
            return False
        if heartbeat.remote is not None:
            return heartbeat.remote.in_collective
        previous = self.stack_checks.get(rank)
        if previous is None or previous[0] != heartbeat.beats or now - previous[1] > self.hang_timeout:
            stack = dump_stack(heartbeat, self.folder.log(self.attempt, rank), stop_after=False)
            self.stack_checks[rank] = previous = (heartbeat.beats, now, in_collective(stack))
        return previous[2]

    def process_state(self, heartbeat: HeartbeatReading, cpu_ticks: int) -> str:
        stat = heartbeat.stat
        if not stat:
            return "its process is gone"
        if heartbeat.is_stopped:
            return "its process is stopped"
        cpu_seconds = (int(stat["ticks"]) - cpu_ticks) / os.sysconf("SC_CLK_TCK")
        # Other processes may leave it a small part of a processor; it then waits for one, which is the state R as well.
        if cpu_seconds > (RUNNABLE_SHARE if stat.get("state") == "R" else BUSY_SHARE) * self.hang_timeout:
            return f"its process is busy (used {cpu_seconds:.1f} s of processor time)"
        return "its process is sleeping"

    def find_stragglers(self, heartbeats: dict[int, HeartbeatReading]) -> list[Straggler]:
        """The ranks whose local phases took much longer than those of the others over the last window of steps."""
        for rank, heartbeat in heartbeats.items():
            if rank not in self.window_start:
                self.window_start[rank] = heartbeat
        if len(heartbeats) < 2 or any(
            heartbeat.completed_steps - self.window_start[rank].completed_steps < STRAGGLER_WINDOW
            for rank, heartbeat in heartbeats.items()
        ):
            return []
        seconds_per_step = {}
        for rank, heartbeat in heartbeats.items():
            start = self.window_start[rank]
            steps = heartbeat.completed_steps - start.completed_steps
            seconds_per_step[rank] = {
                phase: (heartbeat.phase_seconds[phase] - start.phase_seconds[phase]) / steps for phase in LOCAL_PHASES
            }
        first_window = any(start.completed_steps == 0 for start in self.window_start.values())
        self.window_start = dict(heartbeats)
        if first_window:
            return []  # the first window includes start-up
        stragglers = []
        for rank, local in seconds_per_step.items():
            others = [phases for other, phases in seconds_per_step.items() if other != rank]
            median = statistics.median(sum(phases.values()) for phases in others)
            if median > 0 and sum(local.values()) > self.straggler_ratio * median:
                excess = {p: local[p] - statistics.median(phases[p] for phases in others) for p in LOCAL_PHASES}
                phase = max(excess, key=lambda name: excess[name])
                factor = sum(local.values()) / median
                stragglers.append(Straggler(rank, heartbeats[rank].step, phase, factor, excess[phase]))
        return stragglers


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or by a debugger."""
    return process_stat(pid).get("state") in ("T", "t")


def is_starting(heartbeat: HeartbeatReading) -> bool:
    """Whether the rank builds the model or runs the warm-up backward, which take long; a stopped process does not."""
    return heartbeat.phase in ("start", "warmup") and not heartbeat.is_stopped


def is_waiting(heartbeat: HeartbeatReading) -> bool:
    return heartbeat.waiting or heartbeat.phase == "sync"


def pick_suspect(heartbeats: dict[int, HeartbeatReading], stuck: list[int], waiting: set[int]) -> int:
    """A stuck rank that does not wait for others; if all wait, the one that entered the fewest collectives."""
    return min(
        stuck, key=lambda rank: (rank in waiting, heartbeats[rank].collective_count, heartbeats[rank].step, rank)
    )


WAITING_FRAME = re.compile(
    r"meshwright/core/telemetry/collective_waits\.py|meshwright/core/parallel/.*\.py.* in wait$"
    r"|^\s*wait \(.*meshwright/core/parallel/"
)
"""The innermost frame of a rank that waits: during a step torch's functions that wait are called from `WaitTimer`,
before the first step from the frames of torch or of `PendingTransfer.wait`.
"""

COUNTER_FRAME = re.compile(r"meshwright/core/(telemetry/|fake_operators\.py|trainer/records/step_counters\.py)")
"""A frame of the counters, which run torch's operators on a counted step."""


def in_collective(stack: str) -> bool:
    """Whether the innermost frame of the main thread is that of a wait for a collective, or the innermost frames are
    torch.distributed, as in a collective that blocks. Reads the formats of faulthandler and of py-spy.
    """
    marker = "MainThread" if "MainThread" in stack else "Current thread"
    main_thread = stack.partition(marker)[2]
    frames = [line for line in main_thread.splitlines()[1:] if line.strip()]
    if frames and WAITING_FRAME.search(frames[0]):
        return True
    # On a counted step the counters' frames stand between torch and torch.distributed.
    frames = [line for line in frames if not COUNTER_FRAME.search(line)]
    # torch's pipeline schedules call backward: autograd computes there, it does not wait.
    innermost = takewhile(lambda frame: "torch/" in frame and "torch/autograd/" not in frame, frames)
    return any("torch/distributed/" in frame for frame in islice(innermost, 24))


def find_collective_mismatch(heartbeats: dict[int, HeartbeatReading]) -> tuple[int, str] | None:
    """The first collective that the ranks did not enter alike: the rank that differs, and the message."""
    if len(heartbeats) < 2:
        return None
    common = set.intersection(*(set(heartbeat.recent_collectives) for heartbeat in heartbeats.values()))
    for count in sorted(common):
        names = {rank: heartbeat.recent_collectives[count] for rank, heartbeat in heartbeats.items()}
        if len(set(names.values())) > 1:
            majority = statistics.mode(names.values())
            rank = next(rank for rank, name in names.items() if name != majority)
            return rank, (
                f"ranks entered different collectives: collective {count} is {names[rank]!r} on rank {rank} and "
                f"{majority!r} on rank(s) {', '.join(str(r) for r, name in names.items() if name == majority)}"
            )
    return None


def dump_stack(heartbeat: HeartbeatReading, log: Path, patience: float = 2.0, stop_after: bool = True) -> str:
    """The Python stack of a rank: from py-spy if it is installed, else from the rank's faulthandler, which writes to
    the rank's log. With `stop_after` the rank is stopped afterwards, because it is about to be killed.
    """
    if not heartbeat.is_alive:
        return ""
    if heartbeat.remote is not None:
        return heartbeat.remote.stack
    if py_spy := shutil.which("py-spy"):
        try:
            completed = subprocess.run(
                [py_spy, "dump", "--nonblocking", "--pid", str(heartbeat.pid)],
                capture_output=True,
                timeout=10,
                check=False,
            )
            if completed.returncode == 0:
                return completed.stdout.decode(errors="replace")
        except (OSError, subprocess.TimeoutExpired):
            pass
    size_before = log.stat().st_size if log.exists() else 0
    try:
        os.kill(heartbeat.pid, signal.SIGUSR1)
        if stop_after:
            os.kill(heartbeat.pid, signal.SIGCONT)  # a stopped process handles SIGUSR1 once it continues
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and (not log.exists() or log.stat().st_size == size_before):
            time.sleep(0.002)
        time.sleep(0.02)  # until the last lines are written
        if stop_after:
            os.kill(heartbeat.pid, signal.SIGSTOP)
        with open_regular_file(log) as file:
            file.seek(size_before)
            return file.read(65536).decode(errors="replace")
    except (ProcessLookupError, OSError):
        return ""
