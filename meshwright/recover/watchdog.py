"""Who hangs and who is slow, seen from outside: the ranks' pages, and what the kernel says of them. Torch-free.

A rank that waits for others is never the cause. The one to name is the one that the others wait for: stopped,
spinning, asleep, or in another collective than the rest.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

from meshwright.recover.incidents import read_heartbeats
from meshwright.telemetry.heartbeat import HeartbeatReading, process_stat
from meshwright.telemetry.run_folder import RunFolder

LOCAL_PHASES = ("fetch", "copy", "forward", "backward", "update", "save")
"""The phases that are a rank's own; in `sync` it waits for others."""
STARTUP_FACTOR = 10
"""How many times the bound a rank may take to come to its first step."""
STRAGGLER_WINDOW = 20
"""Steps over which ranks are compared."""


@dataclass(frozen=True)
class Hang:
    rank: int
    """-1 for the process that starts the ranks"""
    message: str
    stack: str
    pages: dict[int, HeartbeatReading]
    """where every rank was when it was found"""


@dataclass(frozen=True)
class Straggler:
    rank: int
    step: int
    phase: str
    factor: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: {self.factor:.1f} times the others over the last {STRAGGLER_WINDOW} steps, "
            f"most of it in {self.phase} ({self.seconds * 1e3:.0f} ms a step more)"
        )


class Watchdog:
    """Looks at an attempt's pages now and then. Keeps what it saw before; decides by its own monotonic clock."""

    def __init__(self, folder: RunFolder, attempt: int, bound: float, straggler: float) -> None:
        self.folder, self.attempt, self.bound, self.factor = folder, attempt, bound, straggler
        self.seen: dict[int, tuple[int, float]] = {}
        """beats and when they last moved, by rank"""
        self.ticks: dict[int, int] = {}
        self.asked: dict[int, tuple[int, float, bool]] = {}
        """beats, when a rank's stack was taken, and whether it ended in a collective"""
        self.marks: dict[int, HeartbeatReading] = {}
        self.over = float("inf")
        """since when every rank is at its end"""

    def look(self) -> tuple[Hang | None, list[Straggler], int]:
        """(who hangs, who is slow, the signal that a rank has seen)."""
        found, now = read_heartbeats(self.folder, self.attempt), time.monotonic()
        pages = {rank: page for rank, page in found.items() if page.phase != "end"}  # whoever is done owes no sign
        self.over = min(self.over, now) if found and not pages else float("inf")
        if now - self.over > self.bound:
            said = "every rank has come to its end and the process that started them says nothing"
            return Hang(-1, said, "", found), [], 0
        for rank, page in pages.items():
            if rank not in self.seen or self.seen[rank][0] != page.beats:
                self.seen[rank] = (page.beats, now)
                self.ticks[rank] = int(process_stat(page.pid).get("ticks", 0))
        number = next((page.signal for page in pages.values() if page.signal), 0)
        return self.hang(pages, now), self.stragglers(pages), number

    def hang(self, pages: dict[int, HeartbeatReading], now: float) -> Hang | None:
        still = {rank: now - self.seen[rank][1] for rank in pages}
        # One rank alone may hang while the others still beat, on their way to the next collective.
        stuck = [
            rank
            for rank, page in pages.items()
            if still[rank] > self.bound * (STARTUP_FACTOR if is_starting(page) else 1)
        ]
        if not stuck:
            return None
        waiting = {rank for rank in stuck if is_waiting(pages[rank])}
        # Messages within forward and backward leave no mark on the page: the stacks tell who waits for one.
        waiting |= {rank for rank in stuck if rank not in waiting and self.waits_inside(rank, pages[rank], now)}
        if len(waiting) == len(pages):
            # Between the passes of a pipeline a rank is in `sync` whatever it does: again the stacks tell.
            idle = {rank for rank in waiting if pages[rank].waiting or self.waits_inside(rank, pages[rank], now)}
            waiting = idle or waiting
        if len(waiting) == len(stuck) < len(pages):
            return None  # somebody still moves, and these wait for it
        rank = pick_suspect(pages, stuck, waiting)
        odd = find_collective_mismatch(pages)
        rank = rank if odd is None else odd[0]
        page = pages[rank]
        others = sorted(
            {p.collective if is_waiting(p) else p.phase for r, p in pages.items() if r in waiting and r != rank}
        )
        state = self.state(page, self.ticks.get(rank, 0))
        said = f"rank {rank} has shown no sign of life for {still[rank]:.1f} s: {state}, {page.location}"
        if odd is not None:
            said = odd[1]
        elif others:
            said += f"; the other ranks wait in {', '.join(others)}"
        stack = dump_stack(page, self.folder.log(self.attempt, rank))
        return Hang(rank, said, stack, pages)

    def waits_inside(self, rank: int, page: HeartbeatReading, now: float) -> bool:
        """Whether a rank's stack ends in a collective; asked at most once in `bound` seconds while it does not move."""
        if process_stat(page.pid).get("state") in ("T", "t"):
            return False
        asked = self.asked.get(rank)
        if asked is None or asked[0] != page.beats or now - asked[1] > self.bound:
            stack = dump_stack(page, self.folder.log(self.attempt, rank), last=False)
            self.asked[rank] = asked = (page.beats, now, in_collective(stack))
        return asked[2]

    def state(self, page: HeartbeatReading, ticks: int) -> str:
        stat = process_stat(page.pid)
        if not stat:
            return "its process is gone"
        if stat["state"] in ("T", "t"):
            return "its process is stopped"
        used = (int(stat["ticks"]) - ticks) / os.sysconf("SC_CLK_TCK")
        return (
            f"its process spins (used {used:.1f} s of processor)" if used > 0.5 * self.bound else "its process sleeps"
        )

    def stragglers(self, pages: dict[int, HeartbeatReading]) -> list[Straggler]:
        """Ranks whose own phases took much longer than the others' since the last look that was a window ago."""
        for rank, page in pages.items():
            if rank not in self.marks:
                self.marks[rank] = page
        if len(pages) < 2 or any(
            page.completed_steps - self.marks[r].completed_steps < STRAGGLER_WINDOW for r, page in pages.items()
        ):
            return []
        spent = {}
        for rank, page in pages.items():
            mark = self.marks[rank]
            steps = page.completed_steps - mark.completed_steps
            spent[rank] = {
                phase: (page.phase_seconds[phase] - mark.phase_seconds[phase]) / steps for phase in LOCAL_PHASES
            }
        first = {rank for rank, mark in self.marks.items() if mark.completed_steps == 0}
        self.marks = dict(pages)
        if first:
            return []  # the first window holds start-up
        found = []
        for rank, own in spent.items():
            rest = [phases for other, phases in spent.items() if other != rank]
            usual = statistics.median(sum(phases.values()) for phases in rest)
            if usual > 0 and sum(own.values()) > self.factor * usual:
                more = {
                    phase: own[phase] - statistics.median(phases[phase] for phases in rest) for phase in LOCAL_PHASES
                }
                phase = max(more, key=lambda name: more[name])
                found.append(Straggler(rank, pages[rank].step, phase, sum(own.values()) / usual, more[phase]))
        return found


def is_starting(page: HeartbeatReading) -> bool:
    """Building a large model, or reading it, may take long without a sign; a process that was stopped does neither."""
    return page.phase in ("start", "warmup") and process_stat(page.pid).get("state") not in ("T", "t")


def is_waiting(page: HeartbeatReading) -> bool:
    return page.waiting or page.phase == "sync"


def pick_suspect(pages: dict[int, HeartbeatReading], stuck: list[int], waiting: set[int]) -> int:
    """Among ranks that are still, one that does not wait; else the one that is furthest behind."""
    return min(stuck, key=lambda rank: (rank in waiting, pages[rank].collective_count, pages[rank].step, rank))


WAITING_FRAME = re.compile(
    r"meshwright/parallel/context\.py.* in arrive$|^\s*arrive \(.*meshwright/parallel/context\.py"
)
"""A frame of ours that waits for a message by itself, where torch has no frame."""


def in_collective(stack: str) -> bool:
    """Whether the main thread's innermost frames are torch's own distributed code, or ours that waits for a message:
    in faulthandler's spelling or in py-spy's.
    """
    mark = "MainThread" if "MainThread" in stack else "Current thread"
    main = stack.partition(mark)[2]
    # The ledgers stand between torch and its distributed code while a step is counted.
    frames = [line for line in main.splitlines()[1:] if line.strip() and "meshwright/record/" not in line]
    if frames and WAITING_FRAME.search(frames[0]):
        return True
    # A schedule of torch's calls backward: what autograd computes there is no message.
    innermost = takewhile(lambda frame: "torch/" in frame and "torch/autograd/" not in frame, frames)
    return any("torch/distributed/" in frame for frame in islice(innermost, 24))


def find_collective_mismatch(pages: dict[int, HeartbeatReading]) -> tuple[int, str] | None:
    """(the odd rank, what was entered) of the first collective that ranks did not enter alike."""
    if len(pages) < 2:
        return None
    common = set.intersection(*(set(page.recent_collectives) for page in pages.values()))
    for count in sorted(common):
        names = {rank: page.recent_collectives[count] for rank, page in pages.items()}
        if len(set(names.values())) > 1:
            usual = statistics.mode(names.values())
            odd = next(rank for rank, name in names.items() if name != usual)
            return odd, (
                f"ranks entered different collectives: the {count}th is {names[odd]!r} on rank {odd} and {usual!r} on "
                f"rank(s) {', '.join(str(rank) for rank, name in names.items() if name == usual)}"
            )
    return None


def dump_stack(page: HeartbeatReading, log: Path, patience: float = 2.0, last: bool = True) -> str:
    """A rank's Python stack, by py-spy where it is, else by the rank's own faulthandler into its log; where it is the
    `last` that is asked of the rank, it goes no further.
    """
    if not page.is_alive:
        return ""
    if spy := shutil.which("py-spy"):
        try:
            said = subprocess.run(
                [spy, "dump", "--nonblocking", "--pid", str(page.pid)], capture_output=True, timeout=10, check=False
            )
            if said.returncode == 0:
                return said.stdout.decode(errors="replace")
        except (OSError, subprocess.TimeoutExpired):
            pass
    before = log.stat().st_size if log.exists() else 0
    try:
        os.kill(page.pid, signal.SIGUSR1)
        if last:
            os.kill(page.pid, signal.SIGCONT)  # one that is stopped answers once it goes on
        end = time.monotonic() + patience
        while time.monotonic() < end and (not log.exists() or log.stat().st_size == before):
            time.sleep(0.002)
        time.sleep(0.02)  # the last lines
        if last:
            os.kill(page.pid, signal.SIGSTOP)  # it is about to be ended
        with open(log, "rb") as file:
            file.seek(before)
            return file.read(65536).decode(errors="replace")
    except (ProcessLookupError, OSError):
        return ""
