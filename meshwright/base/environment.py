"""What started this process, and how it starts another Python. Torch-free."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

USER_FOLDERS = "MESHWRIGHT_USER_FOLDERS"
"""Passes `user_folders` to a child."""


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or another launcher that sets torchrun's variables, started this process as a rank."""
    return "RANK" in environment and "WORLD_SIZE" in environment


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
