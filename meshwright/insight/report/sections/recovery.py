"""The recovery history of a run as a section of its report: attempts, incidents and checkpoints. Torch-free."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from meshwright.base.history.attempts import AttemptHistory
from meshwright.base.history.checkpoints import CheckpointHistory
from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import format_bytes, format_clock, format_seconds
from meshwright.insight.report.document import Section, Table

MAX_ATTEMPTS = 40
"""Attempts that are listed: the newest."""
MAX_CHECKPOINTS = 20
"""Checkpoints that are listed: the newest."""
MAX_LOG_LINES = 12
"""Lines of a failed rank's output that are shown."""


def recovery_section(history: RunHistory, now: float) -> Section:
    """The section; `now` is the end of an attempt that runs, in Unix seconds."""
    attempts, checkpoints = history.attempts[-MAX_ATTEMPTS:], history.checkpoints[-MAX_CHECKPOINTS:]
    failed = [index for index, attempt in enumerate(attempts) if attempt.outcome in ("failed", "hang", "lost")]
    tables = []
    if attempts:
        headings = ("attempt", "started (UTC)", "duration", "steps", "outcome", "place and reason")
        tables.append(Table(headings, [attempt_row(each, now) for each in attempts], (0, 1, 4, 5), failed))
    if checkpoints:
        headings = ("checkpoint", "attempt", "size", "stall", "duration", "state")
        damaged = [index for index, found in enumerate(checkpoints) if found.state == "damaged"]
        tables.append(Table(headings, [checkpoint_row(found) for found in checkpoints], (0, 5), damaged))
    incident = next((each.incident for each in reversed(attempts) if each.incident and each.incident.log_tail), None)
    tail = "\n".join(incident.log_tail[-MAX_LOG_LINES:]) if incident and incident.outcome in ("failed", "hang") else ""
    return Section("Recovery", [*summary(history)], tables=tables, code=tail, notes=[*notes(history, bool(tail))])


def summary(history: RunHistory) -> Iterator[str]:
    counts = Counter(attempt.outcome for attempt in history.attempts)
    if not counts:
        yield "No attempt is on record."
    elif len(history.attempts) == 1:
        yield f"One attempt, {history.attempts[0].outcome}: the run was not restarted."
    else:
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items())
        yield f"{len(history.attempts):,} attempts: {outcomes}."
    restored = [attempt for attempt in history.attempts if attempt.restored is not None]
    if restored:
        steps = ", ".join(str(attempt.first_step) for attempt in restored[-8:])
        yield f"Attempts that continued from a checkpoint: {len(restored):,}; the newest at step {steps}."
    published = [found for found in history.checkpoints if found.state == "published"]
    if published:
        yield (
            f"{len(published):,} of {len(history.checkpoints):,} checkpoints exist; the newest contains "
            f"{published[-1].step:,} steps."
        )
    else:
        yield "No checkpoint exists."


def notes(history: RunHistory, has_tail: bool) -> Iterator[str]:
    if has_tail:
        yield "The lines above are the last output of the rank that failed."
    if history.save_failures:
        newest = history.save_failures[-1]
        yield f"{len(history.save_failures):,} saves failed, the newest at step {newest['step']}: {newest['message']}"
    if history.stragglers:
        newest = history.stragglers[-1]
        yield f"{len(history.stragglers):,} stragglers were reported, the newest: {newest['message']}"
    hidden = len(history.attempts) - MAX_ATTEMPTS
    if hidden > 0:
        yield f"The {hidden:,} oldest attempts are not listed."


def attempt_row(attempt: AttemptHistory, now: float) -> list[str]:
    started, ended = attempt.started, attempt.ended if attempt.ended is not None else now
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(started)) if is_time(started) else "-"
    duration = format_clock(ended - started) if started is not None else "-"
    steps = f"{attempt.first_step:,} to {attempt.done - 1:,}" if attempt.steps_recorded else "none"
    return [str(attempt.number), begun, duration, steps, attempt.outcome, reason_of(attempt)]


def is_time(seconds: float | None) -> bool:
    return seconds is not None and 0 <= seconds < 1e11


def reason_of(attempt: AttemptHistory) -> str:
    """Where and why an attempt ended, and what the supervisor made of it."""
    incident = attempt.incident
    if incident is None or incident.outcome == "complete":
        return ""
    place = f"rank {incident.rank} {incident.when}" if incident.rank is not None else incident.when
    place += f", {incident.phase}" if incident.phase else ""
    place = f"host {incident.host}, {place}" if incident.host else place
    lines = incident.message.splitlines()
    verdict = f" ({incident.verdict})" if incident.verdict else ""
    return f"{place}: {lines[0][:300] if lines else incident.outcome}{verdict}"


def checkpoint_row(found: CheckpointHistory) -> list[str]:
    return [
        f"{found.step:,} steps",
        str(found.attempt),
        format_bytes(found.bytes) if found.bytes is not None else "-",
        format_seconds(found.stall_seconds) if found.stall_seconds is not None else "-",
        format_seconds(found.seconds) if found.seconds is not None else "-",
        found.state,
    ]
