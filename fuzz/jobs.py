"""Runs command lines of Meshwright in processes of their own, and finds the processes that they leave behind."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.parent_death import exit_with_parent

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
MEMORY_LIMIT = 3 << 30
"""Address space that a process with a memory limit may add to that of the fuzzer."""
ABORT_GRACE = 5.0
"""Seconds that a job which runs too long has to print its stacks."""


def import_once() -> None:
    """Imports what ranks need, once."""
    import torch

    from meshwright.core.launch.ranks import preload_optimizer

    for module in ("meshwright.core.api", "meshwright.core.launch.job", "meshwright.base.cli"):
        importlib.import_module(module)
    torch.set_num_threads(1)
    preload_optimizer()
    gc.collect()
    gc.freeze()  # forked processes would copy every page that their garbage collector marks


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends, so that none goes unnoticed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    code: int
    """The exit code, or minus the number of the signal that killed the job."""
    output: str
    seconds: float
    memory: int
    """Peak resident bytes."""
    timed_out: bool = False


class Job:
    """`meshwright ARGS` in a process of its own, with its output in a file.

    Unless it is cold, the process is forked from the fuzzer, and its ranks are forked from it, so that torch is not
    imported again. A cold job is `python -m meshwright ARGS` with its fork server.
    """

    def __init__(
        self, args: list[str], log: Path, environment: dict[str, str], *, cold: bool = False, bounded: bool = False
    ) -> None:
        self.args, self.log = args, log
        self.began = time.monotonic()
        fuzzer = os.getpid()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            run_child(args, log, environment, fuzzer, cold, bounded)
        self._handle = os.pidfd_open(self.pid)
        self._ended: Ended | None = None

    def is_running(self, seconds: float = 0.0) -> bool:
        """Whether the job still runs after at most `seconds`."""
        return self._ended is None and not select.select([self._handle], [], [], seconds)[0]

    def signal(self, number: int) -> None:
        if self.is_running():
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> Ended:
        """Waits for the end of the job. After `timeout` seconds it is killed, with its stacks in the output."""
        timed_out = self.is_running(timeout)
        if timed_out:
            os.kill(self.pid, signal.SIGABRT)
            if self.is_running(ABORT_GRACE):
                os.kill(self.pid, signal.SIGKILL)
        if self._ended is None:
            _, status, usage = os.wait4(self.pid, 0)
            os.close(self._handle)
            output = self.log.read_bytes().decode(errors="replace")
            seconds = time.monotonic() - self.began
            code = os.waitstatus_to_exitcode(status)
            self._ended = Ended(code, output, seconds, usage.ru_maxrss << 10, timed_out)
        return self._ended


def run_child(args: list[str], log: Path, environment: dict[str, str], fuzzer: int, cold: bool, bounded: bool) -> None:
    """The process of a job. Does not return."""
    code = 1
    try:
        exit_with_parent(fuzzer)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        # A shell starts background processes, such as this fuzzer, with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL if cold else signal.default_int_handler)
        os.chdir(log.parent)
        if bounded:
            limit = address_space() + MEMORY_LIMIT
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        if cold:
            os.execv(sys.executable, [sys.executable, "-m", "meshwright", *args])
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        faulthandler.enable(sys.stderr)
        code = call_main(args)
    except BaseException:  # noqa: BLE001  the child must not return into the fuzzer
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def call_main(args: list[str]) -> int:
    """Runs the command line in this process, with ranks that are forked from it instead of a fork server."""
    from meshwright.base.cli import main
    from meshwright.core import api

    tempfile.tempdir = None  # read TMPDIR again
    api.train_with_fork_server = api.train_as_rank
    try:
        main(args)
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    return 0


def address_space() -> int:
    """The size of the virtual memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    try:
        text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return []
    return [int(child) for child in text.split()]


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


def leftover_processes(jobs: list[Job], seconds: float) -> list[str]:
    """The descendants of this process that belong to no running job and do not end within `seconds`; they are killed.

    A process whose parent has ended becomes a child of this one, see adopt_orphans.
    """
    deadline = time.monotonic() + seconds
    running = {job.pid for job in jobs if job.is_running()}
    while strays := [pid for pid in children(os.getpid()) if pid not in running and not reap(pid)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    described = [f"{pid}: {command_line(pid)}" for pid in strays]
    for pid in strays:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return described


def reap(pid: int) -> bool:
    """Whether a child has ended; its exit status is discarded."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "ended"
