"""Crashes: deterministic, dependent on the data, or caused by the infrastructure. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from meshwright.base.history.attempts import AttemptHistory
from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.failures import HOST_LOST
from meshwright.base.records.incidents import Incident, format_samples
from meshwright.errors import DataError, NumericsError
from meshwright.insight.diagnose.finding import LIMITING_SHARE, Change, Confidence, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.hangs import is_hang
from meshwright.insight.diagnose.run.lost_time import share_lost

MAX_MESSAGE = 300


def find(history: RunHistory) -> Iterator[Finding]:
    """The newest failure. One that the run has survived is reported only if failures cost a share of its time."""
    failed = [
        attempt
        for attempt in history.attempts
        if attempt.outcome in ("failed", "lost")
        and not (attempt.incident is not None and (is_hang(attempt.incident) or is_numerics(attempt.incident)))
    ]
    if not failed:
        return
    newest = failed[-1]
    share = share_lost(history, *failed)
    survived = newest is not history.newest_attempt and history.attempts[-1].done > newest.done
    if not survived or share >= LIMITING_SHARE:
        yield replace(describe_crash(history, newest, failed, share), survived=survived)


def is_numerics(incident: Incident) -> bool:
    """Whether the attempt ended because a value was not finite, which the class numerics explains."""
    return incident.error_type == NumericsError.__name__


def describe_crash(history: RunHistory, attempt: AttemptHistory, failed: list[AttemptHistory], share: float) -> Finding:
    incident = attempt.incident
    evidence = [MeasuredFigure("failed attempts", len(failed), "count", float(len(history.attempts)), "all attempts")]
    if incident is None or incident.outcome == "lost":
        return Finding(
            "crash",
            "infrastructure",
            f"attempt {attempt.number} ended without a report after {attempt.done} steps: its supervisor was killed, "
            "or the host went down",
            share,
            "medium",
            step=attempt.done,
            evidence=tuple(evidence),
            change=Change(action="see the logs of the host and the scheduler; repeat the command to resume"),
            check="meshwright report RUN",
        )
    variant, confidence = classify(incident)
    ranks = Counter(a.incident.rank for a in failed if a.incident is not None and a.incident.rank is not None)
    if incident.rank is not None:
        count = ranks[incident.rank]
        evidence.append(MeasuredFigure(f"failed attempts in which rank {incident.rank} was first", count, "count"))
    message = " ".join(incident.message.split())[:MAX_MESSAGE]
    where = f", rank {incident.rank} first" if incident.rank is not None else ""
    phase = f" in {incident.phase}" if incident.phase else ""
    return Finding(
        "crash",
        variant,
        f"attempt {attempt.number} failed {incident.when}{phase}{where}: {message}",
        share,
        confidence,
        rank=incident.rank,
        step=incident.step,
        phase=incident.phase,
        evidence=tuple(evidence),
        change=Change(action=recommended_action(incident, variant, ranks)),
        check=f"meshwright replay RUN --step {incident.step}" if incident.step is not None else "",
    )


def classify(incident: Incident) -> tuple[str, Confidence]:
    """The kind of a failure: the verdict of its incident, which two failures at one place decide. Of a first failure
    only its kind of error is known.
    """
    if incident.verdict in ("deterministic", "data-dependent", "infrastructure"):
        return incident.verdict, "high"
    if incident.error_type == DataError.__name__:
        return "data-dependent", "high"
    if incident.error_type in ("Exited", HOST_LOST) or incident.killed_externally:
        return "infrastructure", "medium"
    return "deterministic", "low"


def recommended_action(incident: Incident, variant: str, ranks: Counter[int]) -> str:
    if variant == "data-dependent":
        samples = f"samples {format_samples(incident.samples)}" if incident.samples else "the samples of the step"
        return f"look at {samples}: meshwright data show RUN --step {incident.step} --text"
    if variant == "infrastructure":
        if "(SIGKILL)" in incident.message:
            return "the kernel kills a process that exceeds its memory (see dmesg): try fewer ranks per host"
        rank, count = ranks.most_common(1)[0] if ranks else (None, 0)
        if count > 1:
            return f"rank {rank} failed first {count} times: check or replace its host"
        return "repeat the command to resume; if it fails at other steps, check the hosts"
    if incident.verdict == "first failure":
        return "run it again: a failure at the same step is deterministic or comes from its samples; see the traceback"
    return incident.recommendation or "see the traceback in attempts/*/incident.json"
