"""Pushes the records of a run in an object store from the mirror, beside the training. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from meshwright.base.store.mirror import MirroredStore, RunMirror, mirrored_url
from meshwright.base.store.object_process import close_processes
from meshwright.base.store.object_store import require_conditional_put
from meshwright.errors import MeshwrightError

PUSH_SECONDS = 30.0
R = TypeVar("R")


class RecordPusher:
    """Pushes the records of a run every 30 seconds, and at the end of each attempt. For a run in a folder it does
    nothing. A push that fails is reported once and tried again; the training does not wait for it.
    """

    def __init__(self, root: Path | None, report: Callable[[str], None], interval: float = PUSH_SECONDS) -> None:
        """Raises a ConfigError if the object store cannot be used."""
        self.report, self.interval = report, interval
        self.mirror: RunMirror | None = None
        self.thread: threading.Thread | None = None
        self.done = threading.Event()
        self.reported: set[str] = set()
        self.ranks: range | None = None
        """The ranks whose records this host pushes; None: all."""
        if root is not None and (url := mirrored_url(root)):
            require_conditional_put(MirroredStore(url, root))
            self.mirror = RunMirror(root)
            self.mirror.use()

    def beside(self, start: Callable[[int, int], R]) -> Callable[[int, int], R]:
        """Starts the ranks of an attempt as `start` does. What the attempt before has recorded is pushed first, what
        other hosts have written is fetched, and the thread that pushes starts after the ranks were forked.
        """

        def start_both(attempt: int, restart: int) -> R:
            self.stop()
            self.push()
            if self.mirror is not None:
                self.mirror.use()
            ranks = start(attempt, restart)
            self.start()
            return ranks

        return start_both

    def on_host(self, attempt: int, ranks: range) -> None:
        """Push the records of these ranks from now on: this host runs them in a job on several hosts."""
        self.ranks = ranks
        if self.mirror is not None:
            try:
                self.mirror.prepare_attempt(attempt, ranks)
            except OSError as error:
                self.report_once("earlier records of the ranks of this host cannot be fetched", str(error.strerror))
            self.start()

    def start(self) -> None:
        if self.mirror is not None and self.thread is None:
            self.done.clear()
            self.thread = threading.Thread(target=self.run, name="push", daemon=True)
            self.thread.start()

    def run(self) -> None:
        while not self.done.wait(self.interval):
            self.push()

    def push(self) -> None:
        if self.mirror is None:
            return
        try:
            skipped = lambda name: self.report_once(f"{name} is too long, and is not copied to the store")  # noqa: E731
            self.mirror.push(skipped, self.ranks)
        except (OSError, MeshwrightError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.report_once("the records are not copied to the object store, and the training continues", reason)

    def report_once(self, message: str, reason: str = "") -> None:
        if message not in self.reported:
            self.reported.add(message)
            self.report(f"{message}: {reason}" if reason else message)

    def stop(self) -> None:
        if self.thread is not None:
            self.done.set()
            self.thread.join()
            self.thread = None

    def close(self) -> None:
        """Push what is left, and let other commands of this machine use the mirror."""
        self.stop()
        self.push()
        if self.mirror is not None:
            self.mirror.close()
            close_processes()
