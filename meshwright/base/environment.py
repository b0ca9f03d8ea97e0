"""What the process that started this one has decided. Torch-free."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or another launcher that sets torchrun's variables, started this process as a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a job after a checkpoint. A shell ignores SIGINT in what a script starts in the background,
    because Ctrl-C is for the foreground: as Python does, a job leaves an ignored SIGINT ignored.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGINT, signal.SIGTERM)


def forwarded_signal(number: int) -> int:
    """The signal that tells this host's processes of one that another host of the job may have received."""
    return number if number in stop_signals() else signal.SIGTERM
