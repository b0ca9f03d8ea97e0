"""Temporary folders of launches. A lock that is held open says that a folder is in use: a process id means nothing in
another container that shares the folder of temporary files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

PREFIX = "meshwright-ranks-"
LOCK_FILE = "lock"


class ScratchFolder:
    """A temporary folder that exists until `remove`, or until another launch finds that its process has ended."""

    def __init__(self, prefix: str = PREFIX, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # The file gets its name when it is locked: a folder without a lock file is never removed by another launch.
        unnamed = self.path / f".{LOCK_FILE}"
        self._lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(unnamed, self.path / LOCK_FILE)
        self.remove = weakref.finalize(self, remove_folder, self.path, self._lock)
        """Removes the folder; called at the latest when this object is deleted."""


def remove_folder(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def remove_stale_folders(prefix: str = PREFIX, parent: Path | None = None) -> None:
    """Removes the folders of launches that were killed: those of this user whose lock nobody holds."""
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError while the launch runs
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
