"""Signal handling of a rank: a signal is noted at once, even while the training thread is in native code."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from meshwright.base.records.heartbeat import Heartbeat


class SignalWatch:
    """Notes the signals that stop a run. A signal does not interrupt a step: the next step control vector carries
    it, so that all ranks stop before the same step.

    A thread reads the interpreter's wake-up pipe and writes the signal to the heartbeat, where the supervisor sees it
    and starts the grace period.
    """

    def __init__(self, heartbeat: Heartbeat, numbers: tuple[signal.Signals, ...]) -> None:
        self.heartbeat, self.numbers, self.number = heartbeat, numbers, 0
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._note)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def received(self) -> int:
        """The number of the last signal, or 0."""
        return self.number

    def close(self) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        os.write(self._writer, b"\0")  # a data worker may have inherited the pipe, so closing it would end nothing
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        self.heartbeat.set_signal(number)

    def _listen(self) -> None:
        while 0 not in (numbers := os.read(self._reader, 64)):
            for number in numbers:
                if number in self.numbers:
                    self._note(number, None)
