"""The exceptions that Meshwright raises, each with an exit code, what happened, and what to do next."""

from __future__ import annotations

import errno
import os
import re
import sysconfig
import traceback as tracebacks
from pathlib import Path


class MeshwrightError(Exception):
    """Base class of all errors. The message is one line; `hint` says what is expected or what to try.

    Args:
        message: what happened and where: the rank, step, file or config key, with the expected and the found value.
        hint: starts with "expected" if it names legal values, and with "try" if it names an action.
    """

    exit_code = 1
    """exit code of the command line"""
    rank: int | None = None
    """rank that raised the error, if it was raised on a rank"""
    step: int | None = None
    """step at which the rank raised the error, if known"""

    def __init__(self, message: str, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(message, hint)

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


class ConfigError(MeshwrightError):
    """A setting, an argument or a combination of them is not valid."""

    exit_code = 2


class IdentityError(MeshwrightError):
    """The run folder or another rank belongs to a different run: settings that change the numbers differ."""

    exit_code = 3


class CheckpointError(MeshwrightError):
    """There is no intact checkpoint to resume from, or a checkpoint cannot be written."""

    exit_code = 4


class RestartsExhausted(MeshwrightError):
    """The job failed again after the configured number of restarts without progress."""

    exit_code = 5


class DataError(MeshwrightError):
    """A data source cannot provide the samples that the sample stream defines."""

    exit_code = 6


class NumericsError(MeshwrightError):
    """A loss or a gradient is not finite, and `numerics.on_nonfinite` is stop."""

    exit_code = 7


class PeerError(MeshwrightError):
    """Another rank failed, did not join, or differs. The rank that raises this is not the cause."""

    exit_code = 8


class RankError(MeshwrightError):
    """An exception that is not one of Meshwright's ended a rank, for example one in the user's model or loss."""

    phase: str = ""
    """what the rank was doing, such as forward"""
    traceback: str = ""
    """traceback of the original exception"""


class BusyError(MeshwrightError):
    """Another job is using the run folder."""

    exit_code = 9


class StoppedBySignal(MeshwrightError):
    """A signal stopped the run; every rank ended before the same step."""

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(f"stopped by signal {signal_number} before step {step}, on every rank")
        self.exit_code = 128 + signal_number
        self.step = step
        self.args = (signal_number, step)  # constructor arguments, with which the launcher rebuilds the exception


class StoppedBeforeStart(MeshwrightError):
    """A signal stopped the launch before its ranks were ready."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(
            f"stopped by signal {signal_number} before the first step of this launch; checkpoints are unchanged"
        )
        self.exit_code = 128 + signal_number
        self.args = (signal_number,)


class KilledBySignal(MeshwrightError):
    """A second signal killed the ranks without waiting for a checkpoint."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"a second signal {signal_number} killed the ranks; the newest checkpoint is unchanged")
        self.exit_code = 128 + signal_number
        self.args = (signal_number,)


MAX_MESSAGE = 4096
"""Characters of an exception's text that are kept: it may contain a whole tensor or file."""


def cut_text(text: str, limit: int = MAX_MESSAGE) -> str:
    """Cuts text that is longer than `limit` characters, and says how much is missing."""
    return text if len(text) <= limit else f"{text[:limit]} ... {len(text) - limit:,} characters cut"


def describe_exception(error: BaseException) -> str:
    """The text of an exception, cut if it is long, or the name of its class if the text is empty."""
    try:
        return cut_text(str(error).strip()) or type(error).__name__
    except Exception:  # noqa: BLE001  the __str__ of a user's exception may itself fail
        return type(error).__name__


def user_location(error: BaseException) -> str:
    """The innermost line of the user's own code in the traceback of an exception, or an empty string."""
    frames = [frame for frame in tracebacks.extract_tb(error.__traceback__) if is_user_file(frame.filename)]
    return f"{short_path(frames[-1].filename)}, line {frames[-1].lineno}" if frames else ""


def is_user_file(filename: str) -> bool:
    """Whether a file belongs neither to Meshwright nor to an installed package nor to Python."""
    installed = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<frozen")
    return not filename.startswith(installed) and "site-packages" not in filename


def short_path(filename: str) -> str:
    """A path relative to the working directory if it is below it."""
    return os.path.relpath(filename) if filename.startswith(os.getcwd() + os.sep) else filename


LIMIT_HINTS = {
    errno.EMFILE: "try a larger number of open files: ulimit -n",
    errno.ENFILE: "try a larger number of open files of this machine: sysctl fs.file-max",
    errno.EFBIG: "try a larger size of files: ulimit -f",
    errno.ENOSPC: "try to free space on the disk",
    errno.EDQUOT: "try to free space on the disk, or a larger quota",
}
"""errno -> what to try; Gloo quotes the text of an errno."""


def limit_error(error: BaseException) -> ConfigError | None:
    """Returns the error that reports a limit of the machine (open files, size of files, disk), or None."""
    for number, hint in LIMIT_HINTS.items():
        if isinstance(error, OSError) and error.errno == number:
            where = f": {error.filename}" if error.filename else ""
            return ConfigError(f"{os.strerror(number)}{where}", hint)
        if isinstance(error, RuntimeError) and os.strerror(number) in describe_exception(error):
            return ConfigError(describe_exception(error), hint)
    return None


PEER_LOSS_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Connection refused",
    "Socket closed",
    "remote process exited",  # NCCL
    "NCCL communicator was aborted",
)


def is_peer_loss(error: BaseException) -> bool:
    """Tells whether an exception of Gloo or NCCL reports that another rank has left; it is never the root cause."""
    text = describe_exception(error)
    from_torch = type(error).__name__.startswith("Dist") or any(
        name in text.lower() for name in ("gloo", "nccl", "c10d")
    )
    return not isinstance(error, MeshwrightError) and from_torch and any(sign in text for sign in PEER_LOSS_MESSAGES)


PYTHON_SPELLING = {
    r"--run(-dir)? DIR\b": "run=DIR",
    r"--fresh\b": "fresh=True",
    r"--fork\b": "fork=True",
    r"--accept-code\b": "accept_code=True",
    r"--(model|loss|source|collate|init|callbacks|reward) ([\w.:]+)": r"\1=\2",
    r"--parallel-spec ([\w.:]+)": r"parallel_spec=\1",
    r"--no-fallback\b": "fallback=False",
    r"--steps (\d+)": r"steps=\1",
    r"--([a-z_]+(\.[a-z_]+)+)=(\S+)": r"\1 = \3",
}
"""Command-line options in hints -> keyword arguments of `meshwright.train`, and config keys."""


def with_python_hint(error: MeshwrightError) -> MeshwrightError:
    """Rewrites the command-line options in the text of an error as arguments of Meshwright's functions."""
    for pattern, spelling in PYTHON_SPELLING.items():
        error.hint = re.sub(pattern, spelling, error.hint)
    error.message, error.hint = (
        re.sub(r"(?<!torchrun )--([a-z][a-z-]*)", lambda option: option[1].replace("-", "_"), text)
        for text in (error.message, error.hint)
    )
    return error
