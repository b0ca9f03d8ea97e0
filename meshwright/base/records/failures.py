"""Records of failed ranks, and the exception that carries them with the root cause first. Torch-free."""

from __future__ import annotations

import signal
import time
import traceback as tracebacks
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwright.errors import (
    ConfigError,
    MeshwrightError,
    PeerError,
    RankError,
    StoppedBySignal,
    cut_text,
    describe_exception,
    is_peer_loss,
    limit_error,
    user_location,
)

MAX_TRACEBACK = 1 << 16
"""Characters of a traceback that are kept."""
FINAL_EXIT_CODES = (2, 3, 4, 6, 7, 9)
"""Exit codes of errors that every further attempt would raise again."""
HOST_LOST = "HostLost"
"""The `error_type` of the ranks of a host that is lost."""


@dataclass(frozen=True)
class Failure:
    """How one rank ended."""

    rank: int
    """The rank, or -1 for the fork server."""
    error_type: str
    """The name of the exception class; "Killed" and "Exited" for a process that ended without an exception."""
    message: str
    exit_code: int
    time: float
    """This host's monotonic clock; it only orders the failures of one launch."""
    secondary: bool = False
    """Whether the rank failed because it lost another rank; a secondary failure is never the root cause."""
    traceback: str = ""
    step: int | None = None
    error_args: tuple[Any, ...] | None = field(default=None)
    """The constructor arguments of a MeshwrightError, so that `RanksFailed.cause` can rebuild it."""
    phase: str = ""
    """What the rank was doing, as its heartbeat calls it."""
    location: str = ""
    """The line of the user's code in which the exception was raised."""
    host: str = ""
    """The host of the rank, in a job on several hosts."""

    @classmethod
    def from_exception(cls, rank: int, error: BaseException, step: int | None = None, phase: str = "") -> Failure:
        if step is None:  # before the first step, only the machine can be the reason that a limit is reached
            error = limit_error(error) or error
        message = describe_exception(error)
        lost_peer = is_peer_loss(error)
        secondary = isinstance(error, PeerError) or lost_peer
        known = isinstance(error, MeshwrightError)
        return cls(
            rank,
            type(error).__name__,
            f"rank {rank} lost another rank ({message.splitlines()[0][:120]})" if lost_peer else message,
            error.exit_code if isinstance(error, MeshwrightError) else 8 if secondary else 1,
            time.monotonic(),
            secondary,
            "" if known else format_traceback(error),
            step,
            plain_args(error) if known else None,
            phase,
            "" if known else user_location(error),
        )

    @classmethod
    def from_exit_status(cls, rank: int, exit_status: int) -> Failure:
        """The failure of a process that ended without a report."""
        if exit_status < 0:
            name = signal_name(-exit_status)
            return cls(rank, "Killed", f"rank {rank} was killed by signal {-exit_status} ({name})", 8, time.monotonic())
        message = f"rank {rank} exited with status {exit_status} and no report"
        return cls(rank, "Exited", message, 1, time.monotonic())

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Failure:
        failure = cls(**values)
        return failure if failure.error_args is None else replace(failure, error_args=tuple(failure.error_args))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plain_args(error: BaseException) -> tuple[Any, ...] | None:
    """The arguments of an exception if JSON can carry them, else None. Long text is cut."""
    if not all(isinstance(value, str | int | float) for value in error.args):
        return None
    return tuple(cut_text(value) if isinstance(value, str) else value for value in error.args)


def format_traceback(error: BaseException) -> str:
    """The traceback of an exception, in which each entry and the whole are cut if they are long."""
    return cut_text("".join(map(cut_entry, tracebacks.format_exception(error))), MAX_TRACEBACK)


def cut_entry(entry: str) -> str:
    return cut_text(entry.rstrip("\n")) + "\n"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


class RanksFailed(MeshwrightError):
    """One or more ranks of a launch failed; `failures` starts with the root cause."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = sorted(failures, key=lambda failure: (failure.secondary, failure.time))
        self.verdict = ""
        super().__init__(self.first.message)
        self.exit_code = self.first.exit_code
        self.rank, self.step = self.first.rank, self.first.step
        self.args = (self.failures,)

    @property
    def first(self) -> Failure:
        """The root cause."""
        return self.failures[0]

    def cause(self) -> MeshwrightError:
        """The root cause as an exception to raise in this process: the class that the rank raised if it is one of
        Meshwright's, else a RankError that names rank, step, phase, class, message and line, with the traceback.
        """
        first = self.first
        error_class = next((c for c in error_classes() if c.__name__ == first.error_type), None)
        if error_class is not None and first.error_args is not None:
            error = error_class(*first.error_args)
        else:
            error = RankError(self._root_cause_line(), self.verdict)
            error.phase, error.traceback = first.phase, first.traceback.rstrip()
            if first.traceback:
                error.add_note(error.traceback)
        error.exit_code = self.exit_code
        error.rank = first.rank if first.rank >= 0 else None
        error.step = first.step if error.step is None else error.step
        return error

    def _root_cause_line(self) -> str:
        first = self.first
        if f"rank {first.rank}" in first.message or first.rank < 0:
            return first.message
        return f"{self._location()}{first.error_type}: {one_line(first.message)}{self._user_line()}"

    def _location(self) -> str:
        """Rank, step and phase of the root cause."""
        first = self.first
        step = f", step {first.step}" if first.step is not None else ""
        return f"rank {first.rank}{step}{f', {first.phase}' if first.phase else ''}: "

    def _user_line(self) -> str:
        return f" ({self.first.location})" if self.first.location else ""

    def __str__(self) -> str:
        return self.describe(with_traceback=True)

    def describe(self, with_traceback: bool) -> str:
        """The root cause, then one line for every other rank that reports something else."""
        first = self.first
        if first.error_type in (StoppedBySignal.__name__, ConfigError.__name__):
            return first.message
        # Next to one of Meshwright's own errors, the ranks that lost their peer add nothing.
        known = bool(not first.traceback and first.error_type != "Killed")
        where = "" if f"rank {first.rank}" in first.message or known else f"{self._location()}{first.error_type}: "
        lines = [self.verdict] if self.verdict else []
        lines.append(where + first.message + self._user_line())
        if first.traceback and with_traceback:
            lines.append(first.traceback.rstrip())
        for other in self.failures[1:]:
            if other.message != first.message and not (known and other.secondary):
                lines.append(f"  also rank {other.rank}: {other.error_type}: {other.message.partition(chr(10))[0]}")
        return "\n".join(lines)


class AttemptResized(MeshwrightError):
    """An attempt on fewer hosts has ended after a checkpoint, so that the next one uses more."""

    def __init__(self, used: int, hosts: int) -> None:
        super().__init__(f"hosts have returned: the next attempt uses up to {hosts} instead of {used}")


def one_line(text: str) -> str:
    return " ".join(text.split())


def error_classes(base: type[MeshwrightError] = MeshwrightError) -> Iterator[type[MeshwrightError]]:
    """Every loaded class of Meshwright's errors that a rank may raise."""
    for error_class in (base, *base.__subclasses__()):
        if error_class is base:
            yield base
        elif error_class is not RanksFailed:
            yield from error_classes(error_class)
