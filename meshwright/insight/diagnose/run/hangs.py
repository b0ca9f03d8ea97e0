"""Hangs: which rank makes no progress, where, and which ranks wait for it. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.base.history.attempts import AttemptHistory
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.signals import read_signals
from meshwright.base.records.incidents import Incident
from meshwright.insight.diagnose.finding import Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.lost_time import share_lost

WAITING = ", waiting in "
"""What precedes the name of a collective in the location of a rank, see `HeartbeatReading.location`."""
STACK_LINES = 6


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
    return incident.outcome == "hang" or find_mismatch(locations(incident)) is not None


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
        rank = odd.rank if rank is None else rank
        action = "make every rank call the same collectives in the same order: no collective may depend on local data"
    else:
        variant = "no progress"
        what = incident.message or f"rank {rank} makes no progress"
        waits = f"; {waits_text(waiting)} in {', '.join(names)}" if waiting and "wait" not in what else ""
        what = f"attempt {attempt.number} hangs {incident.when}: {what}{waits}"
        action = f"see where rank {rank} is: {last_frame(incident.stack) or attempt_log(history, attempt, rank)}"
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


def last_frame(stack: str) -> str:
    """The innermost line of a stack that is not of torch or of Python's own library; '' if there is none."""
    lines = [line.strip() for line in stack.splitlines() if "File " in line or "(" in line]
    own = [line for line in lines[: 8 * STACK_LINES] if "/torch/" not in line and "/lib/python" not in line]
    return own[0][:300] if own else ""
