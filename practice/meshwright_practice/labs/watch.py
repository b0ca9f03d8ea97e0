"""Watch mode: grades the user's file whenever it is saved, with keys for hints, list, reset and the next lab."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import ConfigError
from meshwright_practice.labs.grader import Grading, grade
from meshwright_practice.labs.lab import Lab
from meshwright_practice.labs.texts import describe_grading, describe_hint, describe_list, describe_problem
from meshwright_practice.labs.workspace import Workspace

POLL = 0.25
KEYS = "h hint   l list   x reset   n next lab   q quit"

ReadKey = Callable[[float], str]
"""Waits at most so many seconds for a key; an empty string if there was none."""


@contextmanager
def terminal_keys() -> Iterator[ReadKey | None]:
    """Reads single keys while standard input is a terminal; None where it is not."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    settings = termios.tcgetattr(descriptor)

    def read_key(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return ""
        key = os.read(descriptor, 1).decode(errors="replace")
        return key or "q"  # the terminal was closed

    tty.setcbreak(descriptor)
    try:
        yield read_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)


class LabWatch:
    """Watches the file of one lab after the other. `show` prints text; `read_key` is None without a terminal."""

    def __init__(
        self, lab: Lab, workspace: Workspace, limit: float, show: Callable[[str], None], read_key: ReadKey | None
    ) -> None:
        self.lab, self.workspace, self.limit = lab, workspace, limit
        self.show, self.read_key = show, read_key
        self.seen: tuple[int, ...] | None = None

    def run(self) -> None:
        """Returns when the user quits."""
        self.open()
        while True:
            self.regrade_if_saved()
            if self.read_key is None:
                time.sleep(POLL)
            elif not self.handle(self.read_key(POLL)):
                return

    def open(self) -> None:
        path, created = self.workspace.open(self.lab)
        if created:
            self.show(describe_problem(self.lab, path))
        self.seen = None

    def regrade_if_saved(self) -> Grading | None:
        """Grades the file if it is not the one that was graded last."""
        path = self.workspace.file(self.lab)
        state = file_state(path)
        if state == self.seen:
            return None
        self.seen = state
        if not state:
            self.show(f"{path} is gone; save it again" + (", or press x" if self.read_key else ""))
            return None
        try:
            grading = grade(self.lab, path, self.limit)
        except ConfigError as error:
            self.show(str(error))
            return None
        self.workspace.add_attempt(grading)
        self.show(describe_grading(grading, path) + (f"\n{KEYS}" if self.read_key else ""))
        return grading

    def handle(self, key: str) -> bool:
        """Does what a key asks for; False if the user quits."""
        match key:
            case "q":
                return False
            case "h":
                self.show(describe_hint(self.lab, *self.workspace.next_hint(self.lab)))
            case "l":
                self.show(describe_list(self.workspace.records()))
            case "x":
                self.reset()
            case "n":
                following = self.workspace.next_lab(after=self.lab)
                if following is None:
                    self.show("All other labs have passed.")
                else:
                    self.lab = following
                    self.open()
        return True

    def reset(self) -> None:
        self.show(f"Replace {self.workspace.file(self.lab)} by the starter? y/n")
        answer = ""
        while self.read_key is not None and not answer:
            answer = self.read_key(POLL)
        if answer == "y":
            path, backup = self.workspace.reset(self.lab)
            self.show(f"{path} is the starter again" + (f"; what it was is in {backup}" if backup else ""))


def file_state(path: Path) -> tuple[int, ...]:
    """What changes when a file is saved; empty if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def watch_lab(lab: Lab, workspace: Workspace, limit: float, show: Callable[[str], None]) -> None:
    with terminal_keys() as read_key:
        LabWatch(lab, workspace, limit, show, read_key).run()
