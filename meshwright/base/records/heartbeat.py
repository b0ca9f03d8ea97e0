"""The heartbeat of a rank: step, phase and collectives in a memory-mapped file that outlives its process. Torch-free.

The training thread itself writes it: a separate thread would go on beating while the training thread hangs. Each field
is written atomically, but the fields are not updated together; a reader treats the heartbeat as evidence, not as a
transaction.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.io import create_file, open_regular_file, write_error
from meshwright.base.records.phases import OUTSIDE_PHASES, TIMED_PHASES

MAGIC = b"MESHBEAT"
SIZE = 4096
RECENT_COLLECTIVES = 32
"""Collectives that the heartbeat remembers, in a ring buffer."""

HEAD = struct.Struct("<8sIIQ")  # magic, version, pid, the process's start in kernel ticks
NOW = struct.Struct("<qQQ16s")  # step, beats, nanoseconds of phase entry (this host's monotonic clock), phase
FLAGS = struct.Struct("<III")  # signal received, waiting for other ranks, events that could not be written
CALLS = struct.Struct("<Q40s")  # number of collectives, name of the last
SECONDS = struct.Struct("<Q" + "d" * len(TIMED_PHASES))  # completed steps, seconds by phase
AT_NOW, AT_FLAGS, AT_CALLS, AT_SECONDS, AT_RING = 32, 80, 96, 160, 512


class Heartbeat:
    """The heartbeat that a rank writes; without a path it stays in this process."""

    def __init__(self, path: Path | None = None) -> None:
        self.memory: bytearray | mmap.mmap = bytearray(SIZE)
        if path is not None:
            file = create_file(path, os.O_RDWR)
            try:
                os.posix_fallocate(file, 0, SIZE)  # a later write on a full disk would end the process with SIGBUS
                self.memory = mmap.mmap(file, SIZE)
            except OSError as error:
                raise write_error(path, error) from None
            finally:
                os.close(file)
        self.beats = self.collective_count = self.completed_steps = 0
        self.step = -1
        self.phase = "start"
        self.phase_entered = time.monotonic_ns()
        self.outside: dict[str, int] = {}
        """nanoseconds in phases that do not belong to a step, since `take_outside` was last called"""
        self.phase_seconds = [0.0] * len(TIMED_PHASES)
        HEAD.pack_into(self.memory, 0, MAGIC, 1, os.getpid(), process_start(os.getpid()))
        self.enter("start", -1)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Records that the training thread is now in this phase, of this step."""
        self.beats += 1
        now = time.monotonic_ns()
        if self.phase in OUTSIDE_PHASES:
            self.outside[self.phase] = self.outside.get(self.phase, 0) + now - self.phase_entered
        self.phase, self.phase_entered = phase, now
        if step is not None:
            self.step = step
        NOW.pack_into(self.memory, AT_NOW, self.step, self.beats, now, phase.encode())

    def take_outside(self) -> dict[str, float]:
        """Returns the seconds in each phase outside of steps since the last call: start, evaluation, save, callback."""
        taken, self.outside = self.outside, {}
        return {phase: round(nanoseconds / 1e9, 7) for phase, nanoseconds in taken.items()}

    def beat(self) -> None:
        """Records progress within the same phase."""
        self.beats += 1
        struct.pack_into("<Q", self.memory, AT_NOW + 8, self.beats)

    def collective(self, name: str) -> None:
        """Records that a collective begins. The order of the names must be equal on all ranks."""
        self.collective_count += 1
        encoded = name.encode()
        CALLS.pack_into(self.memory, AT_CALLS, self.collective_count, encoded)
        slot = self.collective_count % RECENT_COLLECTIVES
        CALLS.pack_into(self.memory, AT_RING + slot * CALLS.size, self.collective_count, encoded)

    def set_waiting(self, waiting: bool) -> None:
        """Records whether the rank waits for other ranks."""
        struct.pack_into("<I", self.memory, AT_FLAGS + 4, waiting)

    def set_signal(self, number: int) -> None:
        """Records the signal that the rank has received."""
        struct.pack_into("<I", self.memory, AT_FLAGS, number)

    def set_lost_events(self, count: int) -> None:
        """Records how many events of the rank are lost because they cannot be written."""
        struct.pack_into("<I", self.memory, AT_FLAGS + 8, count)

    def complete_step(self, phases: dict[str, float]) -> None:
        """Adds the phase seconds of a completed step."""
        self.completed_steps += 1
        self.add_seconds(phases)

    def add_seconds(self, phases: dict[str, float]) -> None:
        """Adds seconds to the phases."""
        self.phase_seconds = [
            seconds + phases.get(phase, 0.0) for phase, seconds in zip(TIMED_PHASES, self.phase_seconds, strict=True)
        ]
        SECONDS.pack_into(self.memory, AT_SECONDS, self.completed_steps, *self.phase_seconds)


@dataclass(frozen=True)
class RemoteProcess:
    """The process of a rank on another host, as the supervisor there sees it."""

    host: str
    stat: dict[str, str | int]
    """What `process_stat` returns on that host."""
    stack: str
    """The stack of the rank if it makes no progress, else ''."""
    in_collective: bool
    """Whether the stack ends in a collective."""


@dataclass(frozen=True)
class HeartbeatReading:
    """A heartbeat as another process reads it."""

    pid: int
    process_started: int
    """the start of the process in kernel ticks; together with the pid it identifies the process"""
    step: int
    """the current step, or -1 before the first"""
    beats: int
    phase_entered: int
    """nanoseconds of the host's monotonic clock"""
    phase: str
    signal: int
    """the signal that the rank has received, or 0"""
    waiting: bool
    """whether the rank waits for other ranks in a collective"""
    lost_events: int
    """events that the rank cannot write, on a full disk for example; 0 once it can write again"""
    collective_count: int
    collective: str
    """the name of the last collective"""
    completed_steps: int
    phase_seconds: dict[str, float]
    recent_collectives: dict[int, str]
    """the names of the last collectives by their number"""
    remote: RemoteProcess | None = None
    """the process, if it runs on another host"""

    @property
    def stat(self) -> dict[str, str | int]:
        """What the kernel says about the process, see `process_stat`."""
        return process_stat(self.pid) if self.remote is None else self.remote.stat

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs; a process that reuses its pid does not count."""
        return self.pid > 1 and self.process_started > 0 and self.stat.get("start") == self.process_started

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped, by SIGSTOP or by a debugger."""
        return self.stat.get("state") in ("T", "t")

    @property
    def location(self) -> str:
        """Step, phase and collective in words."""
        step = f"step {self.step}" if self.step >= 0 else "before the first step"
        return f"{step}, {self.phase}" + (f", waiting in {self.collective}" if self.waiting else "")


def read_heartbeat(path: Path) -> HeartbeatReading | None:
    """Reads a heartbeat file; returns None if it does not exist yet or is something else."""
    try:
        with open_regular_file(path) as file:
            memory = file.read(SIZE)
    except OSError:
        return None
    return parse_heartbeat(memory)


def parse_heartbeat(memory: bytes) -> HeartbeatReading | None:
    """Parses the content of a heartbeat file; returns None if it is something else."""
    if len(memory) != SIZE or memory[:8] != MAGIC:
        return None
    _, _, pid, started = HEAD.unpack_from(memory, 0)
    step, beats, entered, phase = NOW.unpack_from(memory, AT_NOW)
    signal, waiting, lost_events = FLAGS.unpack_from(memory, AT_FLAGS)
    calls, name = CALLS.unpack_from(memory, AT_CALLS)
    completed, *seconds = SECONDS.unpack_from(memory, AT_SECONDS)
    ring = [CALLS.unpack_from(memory, AT_RING + slot * CALLS.size) for slot in range(RECENT_COLLECTIVES)]
    return HeartbeatReading(
        pid=pid,
        process_started=started,
        step=step,
        beats=beats,
        phase_entered=entered,
        phase=decode_text(phase),
        signal=signal,
        waiting=bool(waiting),
        lost_events=lost_events,
        collective_count=calls,
        collective=decode_text(name),
        completed_steps=completed,
        phase_seconds=dict(zip(TIMED_PHASES, seconds, strict=True)),
        recent_collectives={count: decode_text(entry) for count, entry in ring if count},
    )


def decode_text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def process_start(pid: int) -> int:
    """Returns when a process started, in kernel ticks since boot; 0 where it is unknown."""
    return int(process_stat(pid).get("start", 0))


def process_start_time() -> float:
    """Returns when this process started, in Unix seconds; the present time where it is unknown."""
    ticks = process_start(os.getpid())
    if not ticks:
        return time.time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def process_stat(pid: int) -> dict[str, str | int]:
    """Returns state (R, S, D, T), processor ticks and start of a process; empty if it does not run.

    A zombie does not run: it has ended, and only its parent has not asked for its exit status yet. Under a container's
    init process that never asks, it stays for ever.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        state = fields[0].decode()
        if state in ("Z", "X", "x"):
            return {}
        return {"state": state, "ticks": int(fields[11]) + int(fields[12]), "start": int(fields[19])}
    except (OSError, IndexError):
        return {}
