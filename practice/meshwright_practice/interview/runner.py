"""Runs probes of the user's code on forked ranks, in a scratch folder, and says how they ended."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.base.config import LaunchConfig
from meshwright.base.io import printable
from meshwright.core.launch.descendants import orphans_ended
from meshwright.testing import RanksFailed, run_ranks
from meshwright_practice.interview.rank.probes import in_rank
from meshwright_practice.interview.rank.user_process import FILENAME, CallResult
from meshwright_practice.interview.submission import Submission

SECONDS = 20.0
"""Time limit of one probe."""
GRACE = 10.0
"""Seconds after the limit in which a rank may still report; then it is killed."""
FRAME = re.compile(rf'File "{re.escape(FILENAME)}", line (\d+)')


class ProbeFailed(Exception):
    """The user's code did not end as it should. The message names the rank, the end and the line."""


class Runner:
    """Runs the code of one submission. Every probe is a new set of processes, forked from this one."""

    def __init__(self, submission: Submission, scratch: Path, seconds: float = SECONDS, use_cuda: bool = False) -> None:
        self.submission, self.scratch, self.seconds, self.use_cuda = submission, scratch, seconds, use_cuda

    def run(self, probe: str, ranks: int, *args: Any) -> list[CallResult]:
        """One `CallResult` per rank. A rank that ends without a report has an error."""
        source, folder = self.submission.source, str(self.submission.path.resolve().parent)
        launch = LaunchConfig(rendezvous_timeout=30.0, collective_timeout=self.seconds, device="cpu")
        limit = self.seconds + GRACE
        with hidden_cuda(not self.use_cuda), orphans_ended():
            try:
                ended: list[CallResult] = run_ranks(
                    in_rank,
                    ranks,
                    source,
                    folder,
                    str(self.scratch),
                    probe,
                    args,
                    self.seconds,
                    timeout=limit,
                    launch=launch,
                )
                return ended
            except RanksFailed as failed:
                ends = {
                    failure.rank: self._failure(probe, failure.rank, failure.error_type, failure.message)
                    for failure in failed.failures
                }
                return [ends.get(rank, CallResult(error="was ended with the others")) for rank in range(ranks)]

    def values(self, probe: str, ranks: int, *args: Any) -> list[Any]:
        """The values of all ranks; raises ProbeFailed with the first error that is not that of a lost peer."""
        ended = self.run(probe, ranks, *args)
        failures = [(rank, end) for rank, end in enumerate(ended) if end.error]
        if failures:
            rank, end = min(failures, key=lambda each: (is_secondary(each[1].error), each[1].line == 0, each[0]))
            raise ProbeFailed(self.describe(rank, end, ranks))
        return [end.value for end in ended]

    def describe(self, rank: int, end: CallResult, ranks: int) -> str:
        where = f" at {self.submission.place(end.line)}" if end.line else ""
        who = f"rank {rank} of {ranks} " if ranks > 1 else "the code "
        return printable(f"{who}{end.error}{where}")

    def _failure(self, probe: str, rank: int, kind: str, message: str) -> CallResult:
        """How a process ended that could not report; its last lines of output may have the stack."""
        text = read_tail(self.scratch / f"output-{probe}-{rank}.txt")
        frames = FRAME.findall(text)
        if kind == "Hang":
            return CallResult(error=f"did not end within {self.seconds:g} s, and was killed")
        return CallResult(error=f"ended: {message}", line=int(frames[0]) if frames else 0)


def is_secondary(error: str) -> bool:
    return any(
        text in error
        for text in ("Connection closed", "Connection reset", "was ended with", "lost another", "was killed by signal")
    )


def read_tail(path: Path, limit: int = 64 << 10) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""


@contextmanager
def hidden_cuda(hide: bool) -> Iterator[None]:
    """Ranks inherit the environment: code that must run on CPU sees no CUDA device."""
    previous = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hide:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if hide:
            os.environ.pop("CUDA_VISIBLE_DEVICES") if previous is None else os.environ.update(
                CUDA_VISIBLE_DEVICES=previous
            )


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for one round of checks, removed at its end."""
    with tempfile.TemporaryDirectory(prefix="meshwright-interview-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
