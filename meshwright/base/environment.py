"""How this process was started: by which launcher, with which signals, and beside which torch. Torch-free."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from meshwright.errors import ConfigError

FIRST_TORCH, NEXT_TORCH = (2, 11), (2, 14)
"""The supported versions of torch: from the first one up to, and without, the next one. As in pyproject.toml."""


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or another launcher that sets torchrun's variables, started this process as a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def require_torch() -> None:
    """Checks that a supported version of torch is installed. It is not imported.

    torch is not a dependency of the package itself: a container's own build of it is used as it is.
    """
    supported = "{}.{} <= torch < {}.{}".format(*FIRST_TORCH, *NEXT_TORCH)
    if find_spec("torch") is None:
        raise ConfigError("this command needs torch, which is not installed", "try pip install 'meshwright[train]'")
    try:
        found = version("torch")
    except PackageNotFoundError:  # a build that was put on the path without its metadata
        return
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and not FIRST_TORCH <= tuple(map(int, numbers.groups())) < NEXT_TORCH:
        raise ConfigError(f"torch {found} is not supported", f"expected {supported}")


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that stop a job after a checkpoint. A shell ignores SIGINT in what a script starts in the background,
    because Ctrl-C is for the foreground: as Python does, a job leaves an ignored SIGINT ignored.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return (signal.SIGTERM,) if ignored else (signal.SIGINT, signal.SIGTERM)


def forwarded_signal(number: int) -> int:
    """The signal that tells this host's processes of one that another host of the job may have received."""
    return number if number in stop_signals() else signal.SIGTERM
