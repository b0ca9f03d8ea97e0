"""How this process was started, how it starts another Python, and which torch it has. Torch-free."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError

FIRST_TORCH, NEXT_TORCH = (2, 11), (2, 14)
"""The supported versions of torch: from the first one up to, and without, the next one. As in pyproject.toml."""
USER_FOLDERS = "MESHWRIGHT_USER_FOLDERS"
"""Passes `user_folders` to a child."""


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


def python_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command of every Python that Meshwright starts. Without `-P`, Python searches the current folder first, and
    an `http.py` beside a run file would be run in place of Python's own.
    """
    return [python, "-P", "-m", module, *arguments]


def start_python(
    module: str, *arguments: str, env: Mapping[str, str] = os.environ, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts `python_command`; `options` are those of Popen."""
    return subprocess.Popen(python_command(module, *arguments), env={**env, **import_path(module)}, **options)


def import_path(module: str) -> dict[str, str]:
    """The variables by which a child finds its modules. An empty or relative entry of PYTHONPATH is the current folder
    or one beside it, which Python would search before its own modules: the child searches it for entry points alone.
    """
    named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    # A checkout that is not installed is found by such an entry, or by the folder of the user's script.
    searched, folders = absolute_paths(sys.path), user_folders()
    left_out = {*searched[:1], *folders}.intersection(searched)
    packages = [sys.modules[name].__file__ for name in ("meshwright", module.partition(".")[0])]
    named += [root for file in packages if file and (root := str(Path(file).parents[1])) in left_out]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(named)), USER_FOLDERS: os.pathsep.join(folders)}


def user_folders() -> list[str]:
    """The current folder, and the relative entries of PYTHONPATH in the user's command: where his modules may be."""
    entries = os.environ.get("PYTHONPATH")
    relative = [entry for entry in entries.split(os.pathsep) if not os.path.isabs(entry)] if entries else []
    passed = [entry for entry in os.environ.get(USER_FOLDERS, "").split(os.pathsep) if entry]
    return list(dict.fromkeys([*absolute_paths(["", *relative]), *passed]))


def absolute_paths(entries: Iterable[str]) -> list[str]:
    with suppress(FileNotFoundError):  # the current folder has been deleted
        return [os.path.abspath(entry) for entry in entries]
    return []
