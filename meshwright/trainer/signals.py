"""Signals to a rank: noted the moment they come, even while the training thread is deep in native code."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from meshwright.telemetry.heartbeat import Heartbeat

STOPS = (signal.SIGINT, signal.SIGTERM)


class SignalWatch:
    """A signal does not end a step: it is asked for at the start of the next, and all ranks hear of it together.

    A thread reads what the interpreter's own handler writes to a pipe, and puts it on the page, where the supervisor
    sees it and begins to count the grace.
    """

    def __init__(self, page: Heartbeat) -> None:
        self.heartbeat, self.number = page, 0
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in STOPS:
            signal.signal(number, self._note)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def seen(self) -> int:
        return self.number

    def close(self) -> None:
        signal.set_wakeup_fd(self._before)
        os.write(self._writer, b"\0")  # a worker may hold the writer too, so that closing it would end nothing
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        self.heartbeat.set_signal(number)

    def _listen(self) -> None:
        while 0 not in (numbers := os.read(self._reader, 64)):
            for number in numbers:
                if number in STOPS:
                    self._note(number, None)
