"""Ranks forked from this process while it is warm: torch is imported once, not once a rank.

The parent must hold no process group. Where it has started CUDA, ranks are spawned instead (slower, and what they are
given must pickle).
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from meshwright.config import LaunchConfig
from meshwright.errors import ConfigError
from meshwright.launch.rendezvous import RendezvousInfo, join_process_group, leave_process_group
from meshwright.parallel.world import World
from meshwright.parent_death import exit_with_parent
from meshwright.recover.failures import Failure, RanksFailed
from meshwright.telemetry.heartbeat import Heartbeat, process_start

Work = tuple[Callable[..., Any], tuple[Any, ...]]

FOLDER_PREFIX = "meshwright-ranks-"
PEER_LOSS_GRACE = 10.0
"""Seconds that ranks have to end by themselves once one of them says that it lost another."""
CAUSE_GRACE = 2.0
"""Seconds that the others have once the cause is known; they would only wait for it."""


class Ranks:
    """Ranks running `work(world, *args)`. `poll` until it says True, then `results` or the failures."""

    def __init__(
        self,
        work: Callable[..., Any],
        count: int,
        args: Sequence[Any] = (),
        launch: LaunchConfig | None = None,
        facts: Mapping[str, Any] | None = None,
        logs: Sequence[Path] | None = None,
        pages: Sequence[Path] | None = None,
    ) -> None:
        preload_optimizer()
        remove_stale_folders()
        own = f"{FOLDER_PREFIX}{os.getpid()}-{process_start(os.getpid())}-"
        self._folder = tempfile.TemporaryDirectory(prefix=own)
        context: Any = mp.get_context("spawn" if cuda_started() else "fork")
        self._values: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}
        self._pipes: dict[int, Connection] = {}
        self._processes: list[Any] = []
        self._end = float("inf")
        self._asked = 0
        whole: Work = (work, tuple(args))
        given = self._by_file(whole) if context.get_start_method() == "spawn" else whole
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(count):
            reader, writer = context.Pipe(duplex=False)
            place = RendezvousInfo(rank, count, rank, file=os.path.join(self._folder.name, "store"))
            log = str(logs[rank]) if logs else ""
            page = pages[rank] if pages else None
            target_args = (given, place, launch or LaunchConfig(), dict(facts or {}), writer, log, page, os.getpid())
            process = context.Process(target=_rank_main, args=target_args, name=f"rank {rank}")
            process.start()
            writer.close()
            self._pipes[rank] = reader
            self._processes.append(process)

    def _by_file(self, given: Work) -> str:
        """What spawned ranks are given, in a file: through their pipe, one that dies early would block this process."""
        path = os.path.join(self._folder.name, "work")
        try:
            Path(path).write_bytes(ForkingPickler.dumps(given))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"this process has started CUDA, so ranks are spawned, and what they are given cannot be: {error}",
                "call it before anything starts CUDA (autograd does), or define what it is given in a module",
            ) from None
        return path

    def poll(self, seconds: float) -> bool:
        """Waits at most so long for news; True once every rank has ended."""
        if self._asked:
            self._send(self._asked)
        # A rank speaks through its pipe or simply ends; a worker of its own may hold the pipe open beyond that.
        news: dict[Any, int] = {pipe: rank for rank, pipe in self._pipes.items()}
        news |= {self._processes[rank].sentinel: rank for rank in self._pipes}
        for rank in sorted({news[ready] for ready in wait(list(news), seconds)}):
            self._hear(rank)
        now = time.monotonic()
        if self._failures:
            known = not all(failure.secondary for failure in self._failures.values())
            self._end = min(self._end, now + (CAUSE_GRACE if known else PEER_LOSS_GRACE))
        if now > self._end and self._pipes:
            self.kill()
        return not self._pipes

    def _hear(self, rank: int) -> None:
        """A rank's report, or its end without one."""
        pipe = self._pipes.pop(rank)
        try:
            if pipe.poll(0):
                kind, value = pickle.loads(pipe.recv_bytes())
                (self._values if kind == "value" else self._failures)[rank] = value
        except (EOFError, OSError):
            pass
        self._processes[rank].join(PEER_LOSS_GRACE)
        if rank not in self._values and rank not in self._failures:
            self._failures[rank] = Failure.from_exit_status(rank, self._processes[rank].exitcode or 0)
        pipe.close()

    def signal(self, number: int) -> None:
        """Asks every rank to stop; `poll` asks again, since a rank that is still starting does not listen yet."""
        self._asked = number
        self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def kill(self) -> None:
        """Ends what still runs. A rank killed here is no cause, only a witness."""
        for rank in list(self._pipes):
            self._processes[rank].kill()
            self._processes[rank].join(PEER_LOSS_GRACE)
            self._hear(rank)
            if rank in self._failures and self._failures[rank].error_type == "Killed":
                message = f"rank {rank} did not end by itself and was killed"
                self._failures[rank] = replace(self._failures[rank], message=message, secondary=True)

    def results(self) -> list[Any]:
        """Every rank's value in order, or RanksFailed. Leaves nothing behind."""
        self._folder.cleanup()
        if self._failures:
            raise RanksFailed(list(self._failures.values()))
        return [self._values[rank] for rank in sorted(self._values)]


def remove_stale_folders() -> None:
    """Removes what launches that were killed left in the folder for temporary files."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*-*-*"):
        pid, start, *_ = folder.name.removeprefix(FOLDER_PREFIX).split("-")
        if pid.isdigit() and start.isdigit() and process_start(int(pid)) != int(start):
            shutil.rmtree(folder, ignore_errors=True)


def cuda_started() -> bool:
    """Whether this process has started the CUDA driver, which no fork survives. torch knows only of its own starts."""
    if torch.version.cuda is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    not_initialised = 3  # CUDA_ERROR_NOT_INITIALIZED; asking does not start it
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != not_initialised


def raise_if_spawning() -> None:
    """A spawned rank first runs the script that it comes from; a launch there, unguarded, would never end."""
    if getattr(mp.current_process(), "_inheriting", False):
        raise ConfigError(
            "a spawned rank runs this script again, and meets the launch again",
            'put the call under if __name__ == "__main__":',
        )


@cache
def preload_optimizer() -> None:
    """Has torch import now, once, what each rank would import by itself: the first optimizer takes 1.5 s."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)


def run_ranks(
    work: Callable[..., Any],
    count: int,
    *args: Any,
    timeout: float = 120.0,
    launch: LaunchConfig | None = None,
    facts: Mapping[str, Any] | None = None,
) -> list[Any]:
    """`work(world, *args)` on so many ranks, on CPU unless `launch` says otherwise; their values in order. Past the
    timeout every rank is killed.
    """
    ranks = Ranks(
        work, count, args, launch or LaunchConfig(rendezvous_timeout=30.0, collective_timeout=60.0, device="cpu"), facts
    )
    end = time.monotonic() + timeout
    try:
        while not ranks.poll(max(0.0, min(1.0, end - time.monotonic()))):
            if time.monotonic() > end:
                ranks.kill()
                raise TimeoutError(f"ranks were still running after {timeout:g} s")
    except BaseException:
        ranks.kill()
        raise
    return ranks.results()


def _rank_main(
    given: Work | str,
    place: RendezvousInfo,
    launch: LaunchConfig,
    facts: dict[str, Any],
    writer: Connection,
    log: str,
    page: Path | None,
    parent: int,
) -> None:
    """A rank's process from its first line to its last."""
    exit_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # until the work says what a signal means to it
    if log:
        redirect_output(log)
        faulthandler.register(signal.SIGUSR1)  # the watchdog's question; answered even while the lock is held
    status = 0
    heartbeat = Heartbeat()
    try:
        heartbeat = Heartbeat(page)
        torch.set_num_threads(launch.threads)
        work, args = pickle.loads(Path(given).read_bytes()) if isinstance(given, str) else given
        world: World = join_process_group(place, launch, facts, heartbeat)
        value = work(world, *args)
        leave_process_group()
        # by value: torch would pass tensors as handles to memory that ends with this process
        writer.send_bytes(pickle.dumps(("value", value)))
    except BaseException as error:  # noqa: BLE001  whatever ends a rank is reported
        failure = Failure.from_exception(place.rank, error, heartbeat.step if heartbeat.step >= 0 else None)
        writer.send_bytes(pickle.dumps(("failure", failure)))
        status = failure.exit_code
        with suppress(OSError):  # the log may be what is full
            print(failure.traceback or failure.message, file=sys.stderr, flush=True)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)  # a fork must not run its parent's exit handlers


def redirect_output(log: str) -> None:
    """What a rank prints, and what native code under it prints when it aborts, goes to its log."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # A notebook's streams are not file descriptors: a rank's must be.
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
