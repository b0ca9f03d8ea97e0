"""Standard output of rank 0, where a user's own code prints: each line is also an event, which the terminal shows."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, TextIO

MAX_LINE = 2000
"""Letters of a line that the event has; the log of the rank has all of them."""


class ShownOutput:
    """Writes to a stream, and calls `report` with every line. Processes that are forked from this one only write."""

    def __init__(self, stream: TextIO, report: Callable[[str], None]) -> None:
        self._stream, self._report, self._process = stream, report, os.getpid()
        self._partial, self._lock = "", threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # a copy has no attributes yet
            raise AttributeError(name)
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        if os.getpid() == self._process:
            with self._lock:
                *lines, rest = (self._partial + text).split("\n")
                self._partial = rest.rpartition("\r")[2][-MAX_LINE:]
            for line in lines:
                self._report(line.rpartition("\r")[2][:MAX_LINE])
        return written

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def show_output(report: Callable[[str], None]) -> None:
    """Shows what this process prints from now on."""
    stream = sys.stdout
    sys.stdout = ShownOutput(getattr(stream, "_stream", stream), report)
