"""The heartbeat page: where a rank is, in memory that outlives it and that anybody may read. Torch-free.

The training thread itself writes it (a thread of its own would go on beating while the training thread hangs): step,
phase, collectives, and the seconds that each phase has taken. Fields are written one by one; each is whole, and a
reader takes the page as evidence, not as a transaction.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"MESHBEAT"
SIZE = 4096
PHASES = ("fetch", "copy", "forward", "backward", "sync", "update", "evaluate", "save")
"""The phases whose seconds are added up on the page; a page may also name others (start, restore, end)."""
RECENT_COLLECTIVES = 32
"""Collectives that the page remembers."""

HEAD = struct.Struct("<8sIIQ")  # magic, version, pid, the process's start in the kernel's ticks
NOW = struct.Struct("<qQQ16s")  # step, beats, nanoseconds of entry (this host's monotonic clock), phase
FLAGS = struct.Struct("<II")  # signal seen, waiting for other ranks
CALLS = struct.Struct("<Q40s")  # count of collectives, name of the last
SPENT = struct.Struct("<Q" + "d" * len(PHASES))  # steps settled, seconds by phase
AT_NOW, AT_FLAGS, AT_CALLS, AT_SPENT, AT_RING = 32, 80, 96, 160, 512


class Heartbeat:
    """A rank's own page; without a path it lives in this process alone."""

    def __init__(self, path: Path | None = None) -> None:
        self.memory: bytearray | mmap.mmap = bytearray(SIZE)
        if path is not None:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            os.posix_fallocate(file, 0, SIZE)  # or a write to the page on a full disk would end this process
            self.memory = mmap.mmap(file, SIZE)
            os.close(file)
        self.beats = self.collective_count = self.completed_steps = 0
        self.step = -1
        self.phase_seconds = [0.0] * len(PHASES)
        HEAD.pack_into(self.memory, 0, MAGIC, 1, os.getpid(), process_start(os.getpid()))
        self.enter("start", -1)

    def enter(self, phase: str, step: int | None = None) -> None:
        """The training thread is now in this phase of this step."""
        self.beats += 1
        if step is not None:
            self.step = step
        NOW.pack_into(self.memory, AT_NOW, self.step, self.beats, time.monotonic_ns(), phase.encode())

    def beat(self) -> None:
        """Still in the same phase, and moving."""
        self.beats += 1
        struct.pack_into("<Q", self.memory, AT_NOW + 8, self.beats)

    def collective(self, name: str) -> None:
        """A collective begins. The order of their names must be the same on every rank."""
        self.collective_count += 1
        encoded = name.encode()
        CALLS.pack_into(self.memory, AT_CALLS, self.collective_count, encoded)
        CALLS.pack_into(
            self.memory,
            AT_RING + (self.collective_count % RECENT_COLLECTIVES) * CALLS.size,
            self.collective_count,
            encoded,
        )

    def set_waiting(self, yes: bool) -> None:
        struct.pack_into("<I", self.memory, AT_FLAGS + 4, yes)

    def set_signal(self, number: int) -> None:
        struct.pack_into("<I", self.memory, AT_FLAGS, number)

    def complete_step(self, phases: dict[str, float]) -> None:
        """Adds a finished step's seconds by phase."""
        self.completed_steps += 1
        self.add(phases)

    def add(self, phases: dict[str, float]) -> None:
        self.phase_seconds = [
            spent + phases.get(phase, 0.0) for phase, spent in zip(PHASES, self.phase_seconds, strict=True)
        ]
        SPENT.pack_into(self.memory, AT_SPENT, self.completed_steps, *self.phase_seconds)


@dataclass(frozen=True)
class HeartbeatReading:
    """A page as somebody else sees it."""

    pid: int
    process_started: int
    step: int
    beats: int
    phase_entered: int
    phase: str
    signal: int
    waiting: bool
    collective_count: int
    collective: str
    completed_steps: int
    phase_seconds: dict[str, float]
    recent_collectives: dict[int, str]
    """the last collectives by their count"""

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs, and not another that has its number by now."""
        return self.pid > 1 and self.process_started > 0 and process_start(self.pid) == self.process_started

    @property
    def location(self) -> str:
        step = f"step {self.step}, " if self.step >= 0 else ""
        return f"{step}{self.phase}" + (f", waiting in {self.collective}" if self.waiting else "")


def read_heartbeat(path: Path) -> HeartbeatReading | None:
    """None where there is no page yet, or something else."""
    try:
        with open(path, "rb") as file:
            memory = file.read(SIZE)
    except OSError:
        return None
    if len(memory) != SIZE or memory[:8] != MAGIC:
        return None
    _, _, pid, started = HEAD.unpack_from(memory, 0)
    step, beats, entered, phase = NOW.unpack_from(memory, AT_NOW)
    number, waits = FLAGS.unpack_from(memory, AT_FLAGS)
    calls, name = CALLS.unpack_from(memory, AT_CALLS)
    settled, *spent = SPENT.unpack_from(memory, AT_SPENT)
    ring = [CALLS.unpack_from(memory, AT_RING + slot * CALLS.size) for slot in range(RECENT_COLLECTIVES)]
    history = {count: text(entry) for count, entry in ring if count}
    return HeartbeatReading(
        pid,
        started,
        step,
        beats,
        entered,
        text(phase),
        number,
        bool(waits),
        calls,
        text(name),
        settled,
        dict(zip(PHASES, spent, strict=True)),
        history,
    )


def text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def process_start(pid: int) -> int:
    """When a process began, in ticks since boot: with its pid, a name that is never used twice. 0 where unknown."""
    return int(process_stat(pid).get("start", 0))


def process_stat(pid: int) -> dict[str, str | int]:
    """state (R, S, D, T, Z), processor ticks used, start; empty for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return {"state": fields[0].decode(), "ticks": int(fields[11]) + int(fields[12]), "start": int(fields[19])}
    except (OSError, IndexError):
        return {}
