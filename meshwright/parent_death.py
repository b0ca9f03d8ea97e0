"""A process's tie to its parent. Torch-free."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def exit_with_parent(parent: int) -> None:
    """Linux: the kernel ends this process when its parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
