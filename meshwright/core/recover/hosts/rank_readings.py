"""What a host tells the leader about its ranks: their heartbeats, their processes, and the stack of one that hangs.
Torch-free.
"""

from __future__ import annotations

import base64
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from meshwright.base.io import open_regular_file
from meshwright.base.records.heartbeat import SIZE, HeartbeatReading, RemoteProcess, parse_heartbeat, process_stat
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.recover.hosts.messages import Message
from meshwright.core.recover.watchdog import dump_stack, in_collective

MAX_STACK = 1 << 15
"""Characters of a stack that are sent."""


class RankReadings:
    """Reads the heartbeats of the ranks of this host. The stack of a rank that makes no progress is dumped once per
    hang timeout, because only its own host can do that.
    """

    def __init__(self, folder: RunFolder, attempt: int, ranks: range, hang_timeout: float) -> None:
        self.folder, self.attempt, self.ranks, self.hang_timeout = folder, attempt, ranks, hang_timeout
        self.progress: dict[int, tuple[int, float]] = {}
        """rank -> (beat counter, when it last advanced or the stack was dumped)"""
        self.stacks: dict[int, Future[str]] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="stacks")
        """Dumps stacks, which takes seconds: the beats of this host go on meanwhile."""

    def read(self) -> Message:
        """The ranks of this host, by rank, as JSON."""
        found: Message = {}
        now = time.monotonic()
        for rank in self.ranks:
            try:
                with open_regular_file(self.folder.heartbeat(self.attempt, rank)) as file:
                    memory = file.read(SIZE)
            except OSError:
                continue
            if (reading := parse_heartbeat(memory)) is not None:
                found[str(rank)] = {
                    "heartbeat": base64.b64encode(zlib.compress(memory, 1)).decode(),
                    "process": process_stat(reading.pid) if reading.is_alive else {},
                    "stack": self._stack_if_idle(rank, reading, now),
                }
        return found

    def _stack_if_idle(self, rank: int, reading: HeartbeatReading, now: float) -> str:
        beats, since = self.progress.get(rank, (-1, 0.0))
        if reading.beats != beats:
            self.progress[rank] = (reading.beats, now)
            self.stacks.pop(rank, None)
        elif now - since > self.hang_timeout and not reading.is_stopped:
            self.progress[rank] = (beats, now)
            log = self.folder.log(self.attempt, rank)
            self.stacks[rank] = self.thread.submit(dump_stack, reading, log, stop_after=False)
        stack = self.stacks.get(rank)
        return stack.result()[:MAX_STACK] if stack is not None and stack.done() else ""

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


def decode_readings(host: str, ranks: dict[str, Any]) -> dict[int, HeartbeatReading]:
    """The readings in a beat of a host; entries that are not valid are left out."""
    readings = {}
    for key, values in ranks.items():
        try:
            memory = zlib.decompressobj().decompress(base64.b64decode(values["heartbeat"]), SIZE)
            reading = parse_heartbeat(memory)
            stack, process = str(values["stack"]), dict(values["process"])
            if reading is not None:
                remote = RemoteProcess(host, process, stack, in_collective(stack))
                readings[int(key)] = replace(reading, remote=remote)
        except (ValueError, TypeError, KeyError, zlib.error):
            continue
    return readings
