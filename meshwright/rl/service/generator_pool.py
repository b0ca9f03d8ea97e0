"""The generator processes of a run: starts them, replaces those that end or take too long, and gives up in the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from socket import socket

from meshwright.base.io import open_descriptor, open_regular_file, write_error
from meshwright.core import faults
from meshwright.rl.child_process import ChildProcess, describe_status, fork_child
from meshwright.rl.service.server import RolloutServer

MAX_ENDS_IN_A_ROW = 5
"""Generators of one place that end without a group before the run stops."""
BACKOFF_SECONDS = 0.2
LOG_TAIL_BYTES = 2000


@dataclass
class Place:
    """A place for a generator: its number, the process that has it now, and how its predecessors ended."""

    number: int
    process: ChildProcess | None = None
    incarnation: int = 0
    ends_in_a_row: int = 0
    start_after: float = 0.0
    started: float = 0.0

    @property
    def name(self) -> str:
        """The name of the generator: another process in the same place has another name."""
        return f"generator {self.number}.{self.incarnation}"


class GeneratorPool:
    """The generators that this run starts. `start(name, number)` is what a generator process runs."""

    def __init__(self, count: int, timeout: float, folder: Path, start: Callable[[str, int], None]) -> None:
        self.timeout, self.folder, self.start = timeout, folder, start
        self.places = [Place(number) for number in range(count)]

    def watch(self, server: RolloutServer) -> str:
        """Starts the generators that do not run, and kills those that take too long for a group. Returns why no
        generator can work, or an empty string.
        """
        now = time.monotonic()
        late = {
            client.generator
            for client in server.clients.values()
            if client.generator and client.pending is None and client.since and now - client.since > self.timeout
        }
        connected = {client.generator for client in server.clients.values()}
        for place in self.places:
            if place.name in server.useful:
                place.ends_in_a_row = 0
            starting = place.process is not None and place.name not in connected
            server.progress += starting
            if place.process is not None and place.name in late:
                server.report(f"{place.name} was killed: a group took more than {self.timeout:g} s")
                place.process.kill(5.0)
            elif place.process is not None and starting and now - place.started > self.timeout:
                server.report(f"{place.name} was killed: it had not connected after {self.timeout:g} s")
                place.process.kill(5.0)
            if place.process is not None and (status := place.process.wait()) is not None:
                self._ended(place, status, server)
            if place.process is None and now >= place.start_after and place.ends_in_a_row < MAX_ENDS_IN_A_ROW:
                self._start(place, server)
        if self.places and all(place.ends_in_a_row >= MAX_ENDS_IN_A_ROW for place in self.places):
            last = self._last_line()
            return f"every generator ended {MAX_ENDS_IN_A_ROW} times in a row without a group: {last}"
        return ""

    def _last_line(self) -> str:
        """What the first generator printed last."""
        try:
            with open_regular_file(self.log(self.places[0].number)) as file:
                file.seek(-min(LOG_TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:  # the folder is gone, or the disk was full
            lines = []
        return lines[-1] if lines else "it printed nothing"

    def log(self, number: int) -> Path:
        return self.folder / f"generator-{number:04d}.log"

    def _ended(self, place: Place, status: int, server: RolloutServer) -> None:
        server.report(f"{place.name} {describe_status(status)}")
        place.process = None
        place.incarnation += 1
        place.ends_in_a_row += 1
        if place.ends_in_a_row == MAX_ENDS_IN_A_ROW:
            server.report(f"generator {place.number} is not started again: it ended so often without a group")
        place.start_after = time.monotonic() + BACKOFF_SECONDS * 2 ** min(place.ends_in_a_row - 1, 5)

    def _start(self, place: Place, server: RolloutServer) -> None:
        name, log, number, incarnation = place.name, self.log(place.number), place.number, place.incarnation

        def run(_channel: socket) -> None:
            redirect_output(log)
            faults.arm(number, incarnation)
            self.start(name, number)

        place.started = time.monotonic()
        try:
            place.process = fork_child(run)
        except OSError as error:  # the limit of processes or of memory
            server.report(f"{name} cannot be started: {error.strerror}")
            place.ends_in_a_row += 1
            place.start_after = place.started + BACKOFF_SECONDS * 2 ** min(place.ends_in_a_row, 5)

    def close(self) -> None:
        for place in self.places:
            if place.process is not None:
                place.process.kill(5.0)


def redirect_output(log: Path) -> None:
    """Appends standard output and error of this process to a file, including what native code prints. The file is there
    already where an earlier process had this place.
    """
    try:
        file = open_descriptor(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        raise write_error(log, error) from None
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
