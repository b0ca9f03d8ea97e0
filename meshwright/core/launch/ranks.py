"""Ranks forked from this process: torch is imported once, not once per rank.

The parent must not have a process group. If the parent has initialized CUDA, the ranks are spawned instead, which is
slower and requires that their function and arguments can be pickled.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from meshwright.base.config import LaunchConfig
from meshwright.base.environment import forwarded_signal
from meshwright.base.io import create_file
from meshwright.base.parent_death import exit_with_parent
from meshwright.base.records.failures import Failure, RanksFailed
from meshwright.base.records.heartbeat import Heartbeat, HeartbeatReading, read_heartbeat
from meshwright.base.scratch_folder import ScratchFolder, remove_stale_folders
from meshwright.base.topology.placement import HostPlacement
from meshwright.core.launch.descendants import DescendantGuard, end_descendants, lead_session
from meshwright.core.launch.rendezvous import RendezvousInfo, join_process_group, leave_process_group
from meshwright.core.parallel.world import World
from meshwright.errors import ConfigError

Task = tuple[Callable[..., Any], tuple[Any, ...]]
"""The function that a rank runs, and its arguments after `world`."""

PEER_LOSS_GRACE = 10.0
"""Seconds that the ranks have to end by themselves after one of them reports that it lost a peer."""
ROOT_CAUSE_GRACE = 2.0
"""Seconds that the other ranks have once the root cause is known; they can only wait for the failed rank."""
SAFE_PATH, RANK_ONLY = "PYTHONSAFEPATH", "meshwright"
"""The variable under which spawned ranks start, and its value if it is not the user's."""


class Ranks:
    """Ranks that run `function(world, *args)`. Call `poll` until it returns True, then `results`. With a `placement`
    they are the ranks of this host in a job on several hosts.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        count: int,
        args: Sequence[Any] = (),
        launch: LaunchConfig | None = None,
        facts: Mapping[str, Any] | None = None,
        logs: Sequence[Path] | None = None,
        heartbeats: Sequence[Path] | None = None,
        placement: HostPlacement | None = None,
    ) -> None:
        preload_optimizer()
        remove_stale_folders()
        self._folder = ScratchFolder()
        self._mark = secrets.token_hex(8)
        context: Any = mp.get_context("spawn" if cuda_started() else "fork")
        self._values: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}
        self._kill_deadline = float("inf")
        self._sent_signal = 0
        task: Task = (function, tuple(args))
        self._ranks = placement.local_ranks if placement is not None else range(count)
        paths = heartbeats or [self._folder.path / f"heartbeat-{rank}" for rank in self._ranks]
        self._heartbeats = dict(zip(self._ranks, paths, strict=True))
        payload = self._write_task(task) if context.get_start_method() == "spawn" else task
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self._start(context, payload, placement, launch or LaunchConfig(), dict(facts or {}), logs)
        except OSError as error:
            started = sum(process.pid is not None for process in self._processes.values())
            self._kill_started()
            what = f"rank {started} of {count}" if started < count else "the process that guards the ranks"
            raise ConfigError(
                f"{what} cannot be started: {error.strerror}",
                "try fewer ranks, or allow more processes and open files (ulimit -u, ulimit -n)",
            ) from None
        except BaseException:  # Ctrl-C, while the ranks run already
            self._kill_started()
            raise

    def _start(
        self,
        context: Any,
        payload: Task | str,
        placement: HostPlacement | None,
        launch: LaunchConfig,
        facts: dict[str, Any],
        logs: Sequence[Path] | None,
    ) -> None:
        store = str(self._folder.path / "store")
        for local_rank, rank in enumerate(self._ranks):
            reader, writer = context.Pipe(duplex=False)
            rendezvous = RendezvousInfo(rank, len(self._ranks), local_rank, store_file=store)
            if placement is not None:
                rendezvous = RendezvousInfo.from_placement(placement, local_rank)
            target_args = (
                payload,
                rendezvous,
                launch,
                facts,
                writer,
                logs[local_rank] if logs else None,
                self._heartbeats[rank],
                os.getpid(),
                f"{self._mark}-{rank}",
            )
            process = context.Process(target=_rank_main, args=target_args, name=f"rank {rank}")
            self._processes[rank] = process
            self._pipes[rank] = reader
            with interrupt_after_fork():
                start_safely(process) if isinstance(payload, str) else process.start()
            writer.close()
        with interrupt_after_fork():
            self._guard = DescendantGuard([(f"{self._mark}-{rank}", p.pid) for rank, p in self._processes.items()])

    def _kill_started(self) -> None:
        """Kills the ranks that were started before the start failed or was interrupted."""
        started = {rank: process for rank, process in self._processes.items() if process.pid is not None}
        for process in started.values():
            process.kill()
        for rank, process in started.items():
            process.join(PEER_LOSS_GRACE)
            end_descendants(f"{self._mark}-{rank}", process.pid)
            self._pipes.pop(rank).close()
        self._folder.remove()

    @property
    def launcher_pid(self) -> int:
        return os.getpid()

    def _write_task(self, task: Task) -> str:
        """Pickles the task of spawned ranks to a file; with a pipe, a rank that dies early would block this process."""
        path = self._folder.path / "task"
        try:
            path.write_bytes(ForkingPickler.dumps(task))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                "this process has initialized CUDA, so the ranks are spawned, and their arguments cannot be pickled: "
                f"{error}",
                "try to call it before anything initializes CUDA (autograd does), or define the arguments in a module",
            ) from None
        return str(path)

    def poll(self, seconds: float) -> bool:
        """Waits at most `seconds` for a rank to report or end; True once every rank has ended."""
        if self._sent_signal:
            self._send_signal(self._sent_signal)
        # A rank reports through its pipe or simply ends; processes that it has started may keep both files open.
        sources: dict[Any, int] = {pipe: rank for rank, pipe in self._pipes.items()}
        sources |= {self._processes[rank].sentinel: rank for rank in self._pipes}
        ended = {rank for rank in self._pipes if not self._processes[rank].is_alive()}
        for rank in sorted(ended | {sources[ready] for ready in wait(list(sources), 0 if ended else seconds)}):
            self._collect(rank)
        now = time.monotonic()
        if self._failures:
            known = not all(failure.secondary for failure in self._failures.values())
            grace = ROOT_CAUSE_GRACE if known else PEER_LOSS_GRACE
            self._kill_deadline = min(self._kill_deadline, now + grace)
        if now > self._kill_deadline and self._pipes:
            self.kill()
        if not self._pipes:
            self._guard.release()
        return not self._pipes

    def _collect(self, rank: int) -> None:
        """Takes the report of a rank, or its exit status if it left none, and ends the processes that it started."""
        pipe, process = self._pipes.pop(rank), self._processes[rank]
        if ended := not process.is_alive():
            end_descendants(f"{self._mark}-{rank}", process.pid)  # one of them might keep an incomplete report open
        try:
            if pipe.poll(0):
                kind, value = pickle.loads(pipe.recv_bytes())
                (self._values if kind == "value" else self._failures)[rank] = value
        except (EOFError, OSError):
            pass
        if not ended:
            process.join(PEER_LOSS_GRACE)
            end_descendants(f"{self._mark}-{rank}", process.pid)
        if rank not in self._values and rank not in self._failures:
            self._failures[rank] = Failure.from_exit_status(rank, process.exitcode or 0)
        pipe.close()

    def signal(self, number: int) -> None:
        """Sends a signal to every rank; `poll` repeats it, because a rank that is still starting ignores signals."""
        self._sent_signal = forwarded_signal(number)
        self._send_signal(self._sent_signal)

    def _send_signal(self, number: int) -> None:
        for process in self._processes.values():
            if process.is_alive():
                os.kill(process.pid, number)
                os.kill(process.pid, signal.SIGCONT)  # a stopped process handles a signal once it continues

    def kill(self) -> None:
        """Kills the ranks that still run; their failures are secondary, never the root cause."""
        for rank in self._pipes:
            self._processes[rank].kill()  # all of them first: a rank that sees a peer end prints a traceback
        for rank in list(self._pipes):
            self._processes[rank].join(PEER_LOSS_GRACE)
            self._collect(rank)
            if rank in self._failures and self._failures[rank].error_type == "Killed":
                message = f"rank {rank} did not end by itself and was killed"
                self._failures[rank] = replace(self._failures[rank], message=message, secondary=True)
        self._guard.release()

    def kill_rank(self, rank: int) -> None:
        self._processes[rank].kill()

    def read_heartbeats(self) -> dict[int, HeartbeatReading]:
        """The last heartbeat of every rank of this host."""
        readings = {rank: read_heartbeat(path) for rank, path in self._heartbeats.items()}
        return {rank: reading for rank, reading in readings.items() if reading is not None}

    def kill_hung(self, seconds: float) -> None:
        """Kills the ranks that still run after so many seconds. Each failure says where the rank was; a rank that waits
        for others is never the root cause.
        """
        readings = {rank: read_heartbeat(self._heartbeats[rank]) for rank in self._pipes}
        self.kill()
        for rank, reading in readings.items():
            location = reading.location if reading is not None else "before it wrote a heartbeat"
            waiting, step = (reading.waiting, reading.step) if reading is not None else (False, -1)
            message = f"rank {rank} had not ended after {seconds:g} s: {location}"
            hang = Failure(rank, "Hang", message, 8, time.monotonic(), waiting, step=step if step >= 0 else None)
            self._failures[rank] = hang

    def results(self) -> list[Any]:
        """The return values in the order of the ranks, or RanksFailed. Removes the temporary folder."""
        self._folder.remove()
        if self._failures:
            raise RanksFailed(list(self._failures.values()))
        return [self._values[rank] for rank in sorted(self._values)]


def start_safely(process: Any) -> None:
    """Starts a spawned rank. Its Python imports multiprocessing before it has the search path of this process, and must
    not find one in the current folder.
    """
    os.environ.setdefault(SAFE_PATH, RANK_ONLY)
    try:
        process.start()
    finally:
        forget_safe_path()


def forget_safe_path() -> None:
    """Removes the variable of `start_safely`: a rank and what it starts have the environment of the user."""
    if os.environ.get(SAFE_PATH) == RANK_ONLY:
        del os.environ[SAFE_PATH]


def cuda_started() -> bool:
    """Whether this process has initialized the CUDA driver, which does not survive a fork. `torch.cuda.is_initialized`
    only knows about torch's own initialization.
    """
    if torch.version.cuda is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    not_initialized = 3  # CUDA_ERROR_NOT_INITIALIZED; the query does not initialize the driver
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != not_initialized


def raise_if_spawning() -> None:
    """Raises inside a spawned rank: it first imports the main script, where an unguarded launch would recurse."""
    if getattr(mp.current_process(), "_inheriting", False):
        raise ConfigError(
            "a spawned rank imports the main script, which starts ranks again",
            'try to put the call under if __name__ == "__main__":',
        )


@contextmanager
def interrupt_after_fork() -> Iterator[None]:
    """Delays Ctrl-C until the hooks that Python runs after a fork have ended: an exception in them is ignored, and the
    interrupt would be lost.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@cache
def preload_optimizer() -> None:
    """Makes torch import its optimizers here, once, instead of in every rank (1.5 s)."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)


def run_ranks(
    function: Callable[..., Any],
    count: int,
    *args: Any,
    timeout: float = 120.0,
    launch: LaunchConfig | None = None,
    facts: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Runs `function(world, *args)` on `count` ranks, on CPU unless `launch` says otherwise, and returns their values
    in the order of the ranks. After `timeout` seconds the ranks are killed, and RanksFailed says where each one was.
    """
    launch = launch or LaunchConfig(rendezvous_timeout=30.0, collective_timeout=60.0, device="cpu")
    ranks = Ranks(function, count, args, launch, facts)
    deadline = time.monotonic() + timeout
    try:
        while not ranks.poll(max(0.0, min(1.0, deadline - time.monotonic()))):
            if time.monotonic() > deadline:
                ranks.kill_hung(timeout)
    except BaseException:
        ranks.kill()
        raise
    return ranks.results()


def _rank_main(
    payload: Task | str,
    rendezvous: RendezvousInfo,
    launch: LaunchConfig,
    facts: dict[str, Any],
    writer: Connection,
    log: Path | None,
    heartbeat_path: Path,
    parent: int,
    mark: str,
) -> None:
    """The main function of a rank's process."""
    # A forked rank must not finalize objects of its parent: to destroy a process group, torch waits for its threads,
    # which do not exist here.
    gc.freeze()
    forget_safe_path()
    exit_with_parent(parent)
    lead_session(mark)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # until the function installs its own handlers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `interrupt_after_fork` of the parent
    status = 0
    heartbeat = Heartbeat()
    try:
        if log is not None:
            redirect_output(log)
            faulthandler.register(signal.SIGUSR1)  # for the watchdog; it works even while another thread has the GIL
        heartbeat = Heartbeat(heartbeat_path)
        torch.set_num_threads(launch.threads)
        function, args = pickle.loads(Path(payload).read_bytes()) if isinstance(payload, str) else payload
        world: World = join_process_group(rendezvous, launch, facts, heartbeat)
        value = function(world, *args)
        leave_process_group()
        # By value: torch's pickler would pass tensors as handles to memory that ends with this process.
        writer.send_bytes(pickle.dumps(("value", value)))
    except BaseException as error:  # noqa: BLE001  every end of a rank is reported
        step = heartbeat.step if heartbeat.step >= 0 else None
        failure = Failure.from_exception(rendezvous.rank, error, step, heartbeat.phase)
        writer.send_bytes(pickle.dumps(("failure", failure)))
        status = failure.exit_code
        with suppress(OSError):  # the disk of the log may be full
            print(failure.traceback or failure.message, file=sys.stderr, flush=True)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # a forked process must not run its parent's exit handlers


def redirect_output(log: Path) -> None:
    """Sends standard output and error to the rank's log, including what native code prints."""
    file = create_file(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # In a notebook sys.stdout is not a file descriptor; in a rank it must be one.
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
