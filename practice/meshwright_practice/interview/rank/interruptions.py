"""Kills the process that saves a checkpoint at every point of the save, and looks at what can be loaded afterwards."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.move", "shutil.rmtree")
"""Audit events of Python at which a save is interrupted."""
MAX_EVENTS = 16
INTACT = "intact"


def interrupt_saves(
    module: ModuleType, copy: Callable[[str], Path], moved: Callable[[Path], str], last: Path, newer: str
) -> list[tuple[str, str]]:
    """Saves a newer state over copies of a checkpoint, killed at different points: (point, what load finds then).

    The kernel kills the process when a file would exceed a size, so that every way to write is covered; calls that
    open, rename or remove a file are interrupted before they happen.
    """
    old, new = module.load(str(last)), module.load(newer)
    folder = Path(newer)
    sizes = [file.stat().st_size for file in (folder.rglob("*") if folder.is_dir() else [folder]) if file.is_file()]
    largest = max(sizes, default=0)
    points = [
        (f"after {size:,} of {largest:,} bytes", partial(limit_file_size, size))
        for size in sorted({0, largest // 2, max(0, largest - 1)})
    ]
    points += [
        (f"before file operation {number}", partial(kill_at_event, number)) for number in range(1, MAX_EVENTS + 1)
    ]
    found = []
    for number, (name, prepare) in enumerate(points):
        target = moved(copy(f"point_{number}"))
        status = save_in_child(module, target, new, prepare)
        if status == 0 and name.startswith("before"):
            break  # fewer operations than this
        found.append((name, loadable(module, target, old, new)))
    return found


def save_in_child(module: ModuleType, target: str, state: Any, prepare: Callable[[], None]) -> int:
    """The exit status of a forked process that saves; negative if it was killed."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            prepare()
            module.save(target, state)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def limit_file_size(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def kill_at_event(number: int) -> None:
    seen = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in FILE_EVENTS or (event == "open" and not is_writing(args)):
            return
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def is_writing(args: tuple[Any, ...]) -> bool:
    mode, flags = args[1], args[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def loadable(module: ModuleType, target: str, old: Any, new: Any) -> str:
    """INTACT, or what is wrong with what load returns."""
    try:
        state = module.load(target)
    except Exception as error:  # noqa: BLE001  the user's load may raise anything
        return f"load raised {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return INTACT if same(state, old) or same(state, new) else "load returned a state that was never saved"


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False
