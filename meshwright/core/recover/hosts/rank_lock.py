"""A lock of this host that its ranks hold until the last of them has ended, whatever happens to their supervisor.
Torch-free.

The fork server takes the lock, and the ranks that it forks inherit it: the kernel releases it with the last process. A
supervisor that is started again waits for it before it joins the job, so that ranks of two attempts never run on one
host, even if those of the first do not end although they were killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path


def lock_path(run: Path, host: str) -> Path:
    """The lock of a run on a host; hosts that share a machine have different names."""
    digest = hashlib.sha256(f"{os.getuid()}\n{run}\n{host}".encode()).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"meshwright-ranks-{digest}.lock"


def open_lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def hold_lock(path: Path) -> int:
    """Waits for the lock and takes it, until this process and all that it forks have ended."""
    file = open_lock_file(path)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def is_free(path: Path) -> bool:
    """Whether no process holds the lock. Where locks do not work, none is held."""
    try:
        file = open_lock_file(path)
    except OSError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(file)
    return True
