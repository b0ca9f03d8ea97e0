"""Loads and calls the user's code inside a rank's process: limits, captured output, and ends that are named."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

FILENAME = "<submission>"
"""The file name of the user's code in tracebacks."""
MODULE = "submission"
MAX_FILE_BYTES = 64 << 20
"""Size limit of each file that the user's code writes, printed output included."""
MAX_MEMORY = 3 << 30
"""Bytes of address space that the user's code may add."""


class TimeLimit(BaseException):
    """The user's code has not ended in time. Not an Exception, so that `except Exception` does not swallow it."""


class CalledExit(BaseException):
    """The user's code called os._exit."""


@dataclass(frozen=True)
class CallResult:
    """How a call into the user's code ended: with a value, or with an error at a line of the submission."""

    value: Any = None
    error: str = ""
    line: int = 0
    """line in the source of the submission; 0 if the error is outside of it"""


def call(function: Callable[..., Any], *args: Any, seconds: float) -> CallResult:
    """Calls a function within a time limit. Every end of it, except that of the process, becomes a value."""
    try:
        with time_limit(seconds), exits_as_errors():
            return CallResult(function(*args))
    except TimeLimit as error:
        return CallResult(error=f"did not end within {seconds:g} s", line=user_line(error))
    except CalledExit as error:
        return CallResult(error=f"called os._exit({error})", line=user_line(error))
    except SystemExit as error:
        return CallResult(error=f"called sys.exit({error.code!r})", line=user_line(error))
    except BaseException as error:  # noqa: BLE001  whatever the user's code raises is reported to the user
        text = " ".join(str(error).split())[:300]
        return CallResult(error=f"raised {type(error).__name__}{': ' if text else ''}{text}", line=user_line(error))


def user_line(error: BaseException) -> int:
    """The innermost line of the submission in a traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILENAME]
    return frames[-1].lineno or 0 if frames else 0


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def expire(_number: int, _frame: FrameType | None) -> NoReturn:
        raise TimeLimit

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """os._exit of this process raises, so that the line can be named; in processes that it forks it is the real one."""
    real, owner = os._exit, os.getpid()

    def exit_or_raise(status: int) -> NoReturn:
        if os.getpid() != owner:
            real(status)
        raise CalledExit(status)

    os._exit = exit_or_raise
    try:
        yield
    finally:
        os._exit = real


def enter(folder: Path, name: str) -> None:
    """Prepares a rank's process: working folder, output file, limits. The process ends with the probe."""
    os.chdir(folder)
    output = os.open(folder / f"output-{name}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)  # input() must not wait for the user's terminal
    os.close(empty)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    faulthandler.enable(sys.stderr)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


@contextmanager
def process_group(rank: int, world_size: int) -> Iterator[None]:
    """Gives the submission a process group, also on one rank. It can neither make nor destroy one."""
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    real = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = do_nothing
    try:
        yield
    finally:
        dist.init_process_group, dist.destroy_process_group = real
        if own:
            dist.destroy_process_group()


def do_nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stands for init_process_group and destroy_process_group: the process group exists already."""


def load_submission(source: str, folder: str) -> ModuleType:
    """Runs the code of the submission as a module; `folder` is that of the user's file, for its imports: the last
    one that Python searches, so that no file in it replaces another module.
    """
    sys.path.append(folder)
    module = ModuleType(MODULE)
    sys.modules[MODULE] = module
    exec(compile(source, FILENAME, "exec"), module.__dict__)  # the user asked to run this file
    return module
