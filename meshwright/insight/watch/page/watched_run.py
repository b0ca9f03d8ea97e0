"""One run that is watched: its history, read again as it grows, and a bounded cache of answers. Torch-free."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.run_folder import RunFolder
from meshwright.insight.watch.page.answers import encode
from meshwright.insight.watch.page.run_state import describe_run

MAX_ANSWERS = 64
"""Answers that are kept for readers that ask the same."""
FRESH_SECONDS = 0.5
"""A history that was read this recently is not read again."""


class WatchedRun:
    """A run folder as the page shows it. Its methods may be called from several threads.

    Nothing is read before the first reader asks.

    Args:
        number: the number of the run on this page, which is its name in addresses.
        folder: the run folder.
    """

    def __init__(self, number: int, folder: RunFolder) -> None:
        self.number, self.folder = number, folder
        self.name = folder.root.resolve().name or "/"
        self.version = 0
        """changes whenever the records of the run have"""
        self._history: RunHistory | None = None
        self._copy: RunHistory | None = None
        self._lock = threading.Lock()
        self._updated = 0.0
        self._seen: tuple[Any, ...] = ()
        self._answers: OrderedDict[str, tuple[int, bytes]] = OrderedDict()

    @property
    def is_alive(self) -> bool:
        """Whether the run trained when it was last read."""
        return self._history is not None and self._history.is_alive

    @property
    def config(self) -> dict[str, Any]:
        """The content of run.toml."""
        with self._lock:
            return self._updated_history().config

    def answer(self, question: str, build: Callable[[RunHistory], Any]) -> bytes:
        """Returns what `build` makes of the history as JSON, or what it made of the same records before."""
        with self._lock:
            history = self._updated_history()
            found = self._answers.get(question)
            if found is None or found[0] != self.version:
                found = self._answers[question] = (self.version, encode(build(history)))
                while len(self._answers) > MAX_ANSWERS:
                    self._answers.popitem(last=False)
            self._answers.move_to_end(question)
            return found[1]

    def updated_copy(self) -> RunHistory:
        """Returns a history for one thread that reads it at its own pace, such as the one that collects metrics."""
        if self._copy is None:
            self._copy = RunHistory(self.folder)
        else:
            self._copy.update()
        return self._copy

    def snapshot(self) -> bytes:
        """Returns the state of the run at this moment as JSON, without its series."""
        with self._lock:
            history = self._updated_history()
            about = {"id": self.number, "name": self.name, "version": self.version}
            return encode(about | describe_run(history, time.time()))

    def _updated_history(self) -> RunHistory:
        """Returns the history, read again unless that was a moment ago."""
        if self._history is None:
            self._history = RunHistory(self.folder)
        elif time.monotonic() - self._updated < FRESH_SECONDS:
            return self._history
        else:
            self._history.update()
        history = self._history
        self._updated = time.monotonic()
        newest = history.newest_attempt
        seen = (len(history.steps()), history.newest_record, len(history.attempts), newest and newest.outcome)
        if seen != self._seen:
            self._seen = seen
            self.version += 1
        return history
