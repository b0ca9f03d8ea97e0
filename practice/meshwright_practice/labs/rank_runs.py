"""Runs a user's functions on forked ranks, and says which rank failed and in which line, or where each one hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.config import LaunchConfig
from meshwright.testing import RanksFailed, World, run_ranks
from meshwright_practice.labs.user_error import UserError

ABORTED = "SIGABRT"
SIZE_HINT = "Gloo aborts a rank that gets a message of another size than its tensor: compare the sizes of both ends"
EXIT_HINT = "a rank must return: look for os._exit, a signal, or a crash in native code"


@dataclass(frozen=True)
class UserRanksRun:
    """What came of a run. Exactly one of `values`, `error`, `stacks` and `ended` says it."""

    values: list[Any] = field(default_factory=list)
    error: UserError | None = None
    failed_rank: int | None = None
    stacks: dict[int, str] | None = None
    """rank -> its lines, of the ranks that did not return in time"""
    ended: str = ""
    hint: str = ""


def run_user_ranks(
    function: Callable[..., Any], count: int, args: tuple[Any, ...], path: str, seconds: float
) -> UserRanksRun:
    """Runs `function(world, *args)` on forked ranks for at most `seconds`; `path` is the user's file."""
    launch = LaunchConfig(rendezvous_timeout=4 * seconds, collective_timeout=4 * seconds, device="cpu")
    with tempfile.TemporaryDirectory(prefix="meshwright-lab-") as name:
        folder = Path(name)
        task = (folder, seconds, path, function, args)
        try:
            return UserRanksRun(run_ranks(user_rank, count, *task, timeout=seconds + 1.0, launch=launch))
        except RanksFailed as failed:
            return explain(failed, folder)


def explain(failed: RanksFailed, folder: Path) -> UserRanksRun:
    errors = {int(path.stem): UserError(**json.loads(path.read_text())) for path in folder.glob("*.error")}
    own = {rank: error for rank, error in errors.items() if not error.peer_loss}
    hung = [failure.rank for failure in failed.failures if failure.error_type == "Hang"]
    if own:
        first = next((f.rank for f in failed.failures if f.rank in own), min(own))
        return UserRanksRun(error=own[first], failed_rank=first)
    if hung:
        return UserRanksRun(stacks={rank: read_text(folder / f"{rank}.stack") for rank in hung})
    killed = [failure for failure in failed.failures if failure.error_type in ("Killed", "Exited")]
    if killed or not errors:
        first_failure = killed[0] if killed else failed.first
        aborted = ABORTED in first_failure.message
        return UserRanksRun(ended=first_failure.message, hint=SIZE_HINT if aborted else EXIT_HINT)
    rank = min(errors)
    return UserRanksRun(error=errors[rank], failed_rank=rank)


def read_text(path: Path) -> str:
    with suppress(OSError), path.open(errors="replace") as file:
        return file.read(1 << 16)
    return ""


def user_rank(
    world: World, folder: Path, seconds: float, path: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """One rank: writes its lines into a file if it takes too long, and its exception into another."""
    pid = os.getpid()
    with (folder / f"{world.rank}.stack").open("w") as stack:
        faulthandler.dump_traceback_later(seconds, file=stack)
        try:
            return function(world, *args)
        except BaseException as error:
            (folder / f"{world.rank}.error").write_text(json.dumps(asdict(UserError.from_exception(error, path))))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the launcher would print a traceback
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()
            if os.getpid() != pid:  # the user's code has forked, and this is the copy
                os._exit(0)
