"""What went wrong on which rank, the one to blame first. Torch-free."""

from __future__ import annotations

import signal
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.errors import ConfigError, MeshwrightError, PeerError, Stopped, lost


@dataclass(frozen=True)
class Failure:
    """One rank's end. `at` is this host's monotonic clock, good for order alone."""

    rank: int
    kind: str
    message: str
    exit_code: int
    at: float
    witness: bool = False
    detail: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        message = spoken(error)
        left = lost(error)
        witness = isinstance(error, PeerError) or left
        own = isinstance(error, MeshwrightError)
        return cls(
            rank,
            type(error).__name__,
            f"rank {rank} lost another rank ({message.splitlines()[0][:120]})" if left else message,
            error.exit_code if isinstance(error, MeshwrightError) else 8 if witness else 1,
            time.monotonic(),
            witness,
            "" if own else "".join(traceback.format_exception(error)),
        )

    @classmethod
    def silent(cls, rank: int, exit_status: int) -> Failure:
        """A rank that ended without a word."""
        if exit_status < 0:
            name = signal_name(-exit_status)
            return cls(rank, "Killed", f"rank {rank} was ended by signal {-exit_status} ({name})", 8, time.monotonic())
        return cls(
            rank,
            "Exited",
            f"rank {rank} exited with status {exit_status} and no report",
            1,
            time.monotonic(),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def spoken(error: BaseException) -> str:
    """What an error says; one that says nothing is known by its name."""
    try:
        return str(error).strip() or type(error).__name__
    except Exception:  # noqa: BLE001  a user's error may fail to say even that
        return type(error).__name__


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


class RanksFailed(MeshwrightError):
    """The failures of a launch, the first cause on top."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = sorted(failures, key=lambda f: (f.witness, f.at))
        self.verdict = ""
        super().__init__(self.first.message)
        self.exit_code = self.first.exit_code
        self.args = (self.failures,)

    @property
    def first(self) -> Failure:
        return self.failures[0]

    def __str__(self) -> str:
        """The first cause; then what the others say, a line each, where it is more than an echo."""
        first = self.first
        if first.kind in (Stopped.__name__, ConfigError.__name__):
            return first.message
        known = bool(not first.detail and first.kind != "Killed")  # an error of ours: witnesses add nothing
        where = "" if f"rank {first.rank}" in first.message or known else f"rank {first.rank}: {first.kind}: "
        lines = [self.verdict] if self.verdict else []
        lines.append(where + first.message)
        if first.detail:
            lines.append(first.detail.rstrip())
        for other in self.failures[1:]:
            if other.message != first.message and not (known and other.witness):
                lines.append(f"  also rank {other.rank}: {other.kind}: {other.message.partition(chr(10))[0]}")
        return "\n".join(lines)
