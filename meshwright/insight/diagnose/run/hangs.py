"""Hangs: which rank makes no progress, where, and which ranks wait for it. Torch-free."""

from __future__ import annotations

import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from meshwright.base.history.attempts import AttemptHistory
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.signals import read_signals
from meshwright.base.records.incidents import Incident
from meshwright.insight.diagnose.finding import Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.lost_time import share_lost

WAITING = ", waiting in "
"""What precedes the name of a collective in the location of a rank, see `HeartbeatReading.location`."""
SAME_ORDER = "make every rank call the same collectives in the same order: no collective may depend on local data"
MAX_LINE = 400
FRAME = re.compile(r'\s*(?:File "(.+)", line (\d+) in (.+)|(\S+) \((.+):(\d+)\))$')
"""A frame as faulthandler and as py-spy write it."""
RANK_FUNCTIONS = ("train_rank", "_rank_main")
"""Functions that only Meshwright calls: what called them has started the job."""
LIBRARY = re.compile(r"/lib(?:64)?/python\d+\.\d+t?/|(?:site|dist)-packages/|<frozen ")
"""Files of Python and of installed packages, on any machine."""
PACKAGE = re.compile(r"(?:.*/)?meshwright/")
"""The folder of Meshwright, in the file of one of RANK_FUNCTIONS."""


@dataclass(frozen=True)
class RankLocation:
    """Where a rank was when its attempt ended."""

    rank: int
    location: str
    collectives: int
    """the number of collectives that it had entered"""

    @property
    def collective(self) -> str:
        """The collective that it waits in, or ''."""
        return self.location.partition(WAITING)[2]


def find(history: RunHistory) -> Iterator[Finding]:
    """The newest hang of the run, and one that goes on."""
    yield from find_current(history)
    hung = [attempt for attempt in history.attempts if attempt.incident is not None and is_hang(attempt.incident)]
    if hung:
        newest = hung[-1]
        survived = newest is not history.newest_attempt and history.attempts[-1].done > newest.done
        yield replace(describe_hang(history, newest, hung), survived=survived)


def find_current(history: RunHistory) -> Iterator[Finding]:
    """A run whose processes are alive and make no progress."""
    if not history.is_alive:
        return
    signals = read_signals(history, time.time())
    if signals.state not in ("stalled", "waiting"):
        return
    rank = signals.rank
    reading = history.heartbeats.get(rank) if rank is not None else None
    waiting = sorted(other for other, heartbeat in history.heartbeats.items() if heartbeat.waiting and other != rank)
    yield Finding(
        "hang",
        "in progress",
        f"{signals.sentence}{'; ' + waits_text(waiting) if waiting else ''}",
        1.0,
        "high" if rank is not None else "medium",
        rank=rank,
        step=reading.step if reading is not None and reading.step >= 0 else None,
        phase=reading.phase if reading is not None else "",
        evidence=(MeasuredFigure("seconds without a record", signals.quiet_seconds or 0.0, "s"),),
        change=Change(action="the supervisor ends a rank that hangs after launch.hang_timeout, and dumps its stack"),
        check="meshwright watch RUN",
    )


def is_hang(incident: Incident) -> bool:
    """Whether an attempt ended because a rank made no progress. Ranks that enter different collectives hang, unless the
    backend finds out and fails.
    """
    return incident.outcome == "hang" or bool(incident.mismatch) or find_mismatch(locations(incident)) is not None


def locations(incident: Incident) -> list[RankLocation]:
    return [RankLocation(row["rank"], row["location"], row["collectives"]) for row in incident.ranks]


def find_mismatch(ranks: list[RankLocation]) -> tuple[RankLocation, RankLocation] | None:
    """Two ranks that wait in different collectives although each has entered as many: the one that differs from most
    others, and one of those.
    """
    waiting = [rank for rank in ranks if rank.collective]
    for rank in waiting:
        others = [other for other in waiting if other.collectives == rank.collectives and other is not rank]
        different = [other for other in others if other.collective != rank.collective]
        if different and 2 * len(different) > len(others):
            if len(others) == 1:  # of two ranks, the one that the incident names is not known here
                return max(rank, others[0], key=lambda r: r.rank), min(rank, others[0], key=lambda r: r.rank)
            return rank, different[0]
    return None


def describe_hang(history: RunHistory, attempt: AttemptHistory, hung: list[AttemptHistory]) -> Finding:
    incident = attempt.incident
    assert incident is not None
    ranks = locations(incident)
    mismatch = find_mismatch(ranks)
    rank = incident.rank
    waiting = sorted(row.rank for row in ranks if row.collective and row.rank != rank)
    names = sorted({row.collective for row in ranks if row.collective and row.rank != rank})
    if mismatch is not None:
        variant = "different collectives"
        odd, other = mismatch
        what = (
            f"ranks enter different collectives at step {incident.step}: rank {odd.rank} is in {odd.collective} and "
            f"rank {other.rank} in {other.collective}"
        )
        if rank is None and sum(row.collective == odd.collective for row in ranks if row.collective) * 2 < sum(
            bool(row.collective) for row in ranks
        ):
            rank = odd.rank
        action = SAME_ORDER
    elif incident.mismatch:
        variant, rank = "different collectives", mismatched_rank(incident, ranks)
        places = "; ".join(f"rank {row.rank} at {row.location}" for row in ranks[:8])
        what = f"ranks enter different collectives {incident.when}: {one_line(incident.mismatch)} ({places})"
        action = SAME_ORDER
    else:
        variant = "no progress"
        what = incident.message or f"rank {rank} makes no progress"
        waits = f"; {waits_text(waiting)} in {', '.join(names)}" if waiting and "wait" not in what else ""
        what = f"attempt {attempt.number} hangs {incident.when}: {what}{waits}"
        action = f"see where rank {rank} is: {blocked_place(incident.stack) or attempt_log(history, attempt, rank)}"
    evidence = [MeasuredFigure("attempts that hang", len(hung), "count", float(len(history.attempts)), "attempts")]
    evidence += [
        MeasuredFigure(f"collectives entered by rank {row.rank}", row.collectives, "count") for row in ranks[:8]
    ]
    return Finding(
        "hang",
        variant,
        what,
        share_lost(history, *hung),
        "high",
        rank=rank,
        step=incident.step,
        phase=incident.phase,
        evidence=tuple(evidence),
        change=Change(action=action),
        check=f"meshwright replay RUN --step {incident.step}" if incident.step is not None else "",
    )


def waits_text(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    return f"rank {shown} waits" if len(ranks) == 1 else f"ranks {shown} wait"


def attempt_log(history: RunHistory, attempt: AttemptHistory, rank: int | None) -> str:
    return str(history.folder.log(attempt.number, max(0, rank or 0)))


def mismatched_rank(incident: Incident, ranks: list[RankLocation]) -> int | None:
    """The rank that differs: the one that the watchdog names, or the only one that has entered another number of
    collectives than the others. Of two ranks, nothing tells which one is wrong.
    """
    if named := re.search(r"collective \d+ is .+? on rank (\d+) and ", incident.mismatch):
        return int(named[1])
    for row in ranks if len(ranks) > 2 else ():
        others = {other.collectives for other in ranks if other is not row}
        if len(others) == 1 and row.collectives not in others:
            return row.rank
    return None


def one_line(text: str) -> str:
    """The text without the failure that followed, in one line of bounded length."""
    return " ".join(text.partition("; then ")[0].split())[:MAX_LINE]


def blocked_place(stack: str) -> str:
    """The innermost frame of the user's own code on the main thread, and the call that blocks; '' without a stack."""
    frames = main_frames(stack)
    install = install_folder(stack)
    own = next((frame for frame in frames if is_own(frame[1], install)), None)
    places = [f"{name} ({file}, line {line})"[:MAX_LINE] for name, file, line in filter(None, (own, *frames[:1]))]
    return ", blocked in ".join(dict.fromkeys(places))


def main_frames(stack: str) -> list[tuple[str, str, str]]:
    """(function, file, line) of the frames of the main thread since the rank began, the innermost first."""
    return list(takewhile(lambda frame: frame[0] not in RANK_FUNCTIONS, all_frames(stack)))


def all_frames(stack: str) -> list[tuple[str, str, str]]:
    """The same with the frames that have started the job."""
    marker = "MainThread" if "MainThread" in stack else "Current thread"
    lines = takewhile(
        lambda line: line.strip() and not line.startswith("Thread"), stack.partition(marker)[2].splitlines()[1:]
    )
    parts = [match.groups() for match in map(FRAME.match, lines) if match]
    return [(name or name_2, file or file_2, line or line_2) for file, line, name, name_2, file_2, line_2 in parts]


def install_folder(stack: str) -> str:
    """Where Meshwright is installed on the machine of the stack, else on this one."""
    files = [PACKAGE.match(file) for name, file, _ in all_frames(stack) if name in RANK_FUNCTIONS]
    return next((match[0] for match in files if match), f"{Path(__file__).parents[3]}/")


def is_own(file: str, install: str) -> bool:
    """Whether a file belongs neither to Meshwright nor to torch nor to Python. py-spy cuts the folder off."""
    if LIBRARY.search(file) or file.startswith((install, "meshwright/", "torch/")):
        return False
    top, folder, _ = file.partition("/")
    if folder:
        return not (top in sys.stdlib_module_names and Path(sysconfig.get_path("stdlib"), top).is_dir())
    return top.removesuffix(".py") not in sys.stdlib_module_names
