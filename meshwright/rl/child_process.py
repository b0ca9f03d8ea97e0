"""The forked processes beside the ranks: their streams, signals and limits, and why they ended. Torch-free."""

from __future__ import annotations

import io
import os
import resource
import signal
import socket
import stat
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from meshwright.base.parent_death import exit_with_parent

POLL_SECONDS = 0.002


@dataclass
class ChildProcess:
    """A forked process and the channel to it."""

    pid: int
    channel: socket.socket
    status: int | None = None
    """its exit code, or minus the number of the signal that killed it; None while it runs"""

    def wait(self, seconds: float = 0.0) -> int | None:
        """Waits at most this long for the end of the process, and returns its status. The processes that it has left in
        its group are killed.
        """
        deadline = time.monotonic() + seconds
        while self.status is None:
            try:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    self._kill_group()  # before the process is reaped, while its number is its own
                    self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                    break
            except ChildProcessError:  # somebody else has waited for it
                self.status = 0
                break
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        return self.status

    def kill(self, seconds: float) -> None:
        """Kills the process, with the processes of its group, and waits at most this long for its end."""
        with suppress(OSError):
            self.channel.close()
        if self.status is None:  # its number may belong to another process otherwise
            self._kill_group()
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait(seconds)

    def _kill_group(self) -> None:
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)


def fork_child(run: Callable[[socket.socket], None]) -> ChildProcess:
    """Forks a process that calls `run` with its end of a channel and then exits. It leads a process group, and ends
    with the thread that forks it.
    """
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()  # or the child would write it as well
    parent = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads, none of which the child uses
            pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        try:
            exit_with_parent(parent)
            os.setpgid(0, 0)
            ours.close()
            reset_signals()
            detach_files(theirs.fileno())
            run(theirs)
        except BaseException as error:  # noqa: BLE001  a forked process must not return into the code of its parent
            with suppress(Exception):
                print(f"meshwright: a forked process failed: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
    theirs.close()
    with suppress(OSError):
        os.setpgid(pid, pid)  # the child does it, too: whoever is first
    return ChildProcess(pid, ours)


def reset_signals() -> None:
    """Forgets the handlers of the parent. Signals that stop a job may reach all of its processes, and are the
    supervisor's: the ranks save a checkpoint first, for which they need this process. It ends with its parent.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def detach_files(own: int) -> None:
    """Replaces standard input and the sockets of the parent by /dev/null: the peer of a socket must learn of the
    parent's end at once. They are not closed, because an object of the parent may close their numbers again.
    """
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        file = int(name)
        with suppress(OSError):  # the list itself was one of them
            if file > 2 and file not in (own, null) and stat.S_ISSOCK(os.fstat(file).st_mode):
                os.dup2(null, file)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what a function prints before it crashes is not lost


def limit_memory(extra_bytes: int) -> None:
    """Limits the address space of this process to what it has and `extra_bytes`; 0: no limit. If the memory of the
    machine is exhausted, the kernel ends this process before others.
    """
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if extra_bytes:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def describe_status(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "closed its channel"
    if status >= 0:
        return f"exited with code {status}"
    name = (signal.strsignal(-status) or "unknown").lower()
    cause = "; the kernel does so if memory is exhausted" if -status == signal.SIGKILL else ""
    return f"was killed by signal {-status} ({name}{cause})"
