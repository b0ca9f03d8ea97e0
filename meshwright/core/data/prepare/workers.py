"""Maps a function over parts in worker processes, each of which works on one part at a time. Torch-free."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from meshwright.base.parent_death import exit_with_parent
from meshwright.core.data.prepare.readers import Part
from meshwright.errors import DataError, MeshwrightError, describe_exception

Result = TypeVar("Result")
Work = Callable[[Part], Result]
END_SECONDS = 5
"""Time for a worker to end."""


def map_parts(
    work: Work[Result], parts: Iterator[Part], workers: int, closes: tuple[int, ...] = ()
) -> Iterator[tuple[Part, Result]]:
    """(part, result) of every part, in the order in which they are done. A single part needs no other process.

    Workers are forked, so that they share the tokenizer; they close the descriptors `closes`, which this process locks.
    """
    first, second = next(parts, None), next(parts, None)
    if first is None:
        return
    if workers == 1 or second is None:
        with one_thread():
            for part in chain(first, second, parts):
                yield part, work(part)
        return
    with Workers(work, workers, closes) as pool:
        yield from pool.map(chain(first, second, parts))


def chain(first: Part, second: Part | None, parts: Iterator[Part]) -> Iterator[Part]:
    yield first
    if second is not None:
        yield second
    yield from parts


@contextmanager
def one_thread() -> Iterator[None]:
    """The tokenizers library starts no threads: a process that forks ranks later must not have used them."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


class Workers:
    """Forked processes, each with a pipe."""

    def __init__(self, work: Work[Any], count: int, closes: tuple[int, ...]) -> None:
        context = multiprocessing.get_context("fork")
        self.processes: dict[Connection, Any] = {}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until a worker ignores Ctrl-C
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                arguments = (work, theirs, os.getpid(), [*self.processes, ours], closes)
                self.processes[ours] = context.Process(target=serve, args=arguments, daemon=True)
                self.processes[ours].start()
                theirs.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def map(self, parts: Iterator[Part]) -> Iterator[tuple[Part, Any]]:
        """The next part is read while all workers are busy."""
        idle, busy = list(self.processes), dict[Connection, Part]()
        upcoming = next(parts, None)
        while upcoming is not None or busy:
            while upcoming is not None and idle:
                pipe = idle.pop()
                busy[pipe] = upcoming
                try:
                    pipe.send(upcoming)
                except BrokenPipeError:
                    raise self.lost(pipe, upcoming) from None
                upcoming = next(parts, None)
            ready = set(wait(list(busy)))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                try:
                    result = pipe.recv()
                except EOFError:
                    raise self.lost(pipe, busy[pipe]) from None
                if isinstance(result, BaseException):
                    raise result
                idle.append(pipe)
                yield busy.pop(pipe), result

    def lost(self, pipe: Connection, part: Part) -> DataError:
        """The error that reports a worker that was killed, for example for its memory."""
        self.processes[pipe].join(END_SECONDS)
        return DataError(
            f"a worker ended with status {self.processes[pipe].exitcode} at {part.file.row_name} {part.first_row:,} or "
            f"later of {part.file.path}",
            "try the same command with fewer --workers: finished parts are kept",
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.terminate()
        for pipe, process in self.processes.items():
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
            pipe.close()


def serve(work: Work[Any], pipe: Connection, parent: int, siblings: list[Connection], closes: tuple[int, ...]) -> None:
    """Works on parts until the parent ends. The parent alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exit_with_parent(parent)
    for sibling in siblings:
        sibling.close()
    for descriptor in closes:
        os.close(descriptor)
    with one_thread():
        while True:
            try:
                part = pipe.recv()
            except (EOFError, OSError):
                return
            try:
                result = work(part)
            except (MeshwrightError, OSError, MemoryError) as error:
                result = error
            except BaseException as error:  # noqa: BLE001  the tokenizers library panics with a BaseException
                result = DataError(
                    f"{part.file.path} from {part.file.row_name} {part.first_row:,} on cannot be tokenized: "
                    f"{type(error).__name__}: {describe_exception(error)}",
                    "try another tokenizer",
                )
            pipe.send(result)
