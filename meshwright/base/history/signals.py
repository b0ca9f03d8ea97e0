"""The headline signals of a run: progress, communication, recovery posture, and its state. Torch-free."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshwright.base.history.account import GoodputAccount
from meshwright.base.history.attempts import FAILURES, AttemptHistory
from meshwright.base.history.goodput import goodput
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import StepTable
from meshwright.base.io import format_clock, format_seconds
from meshwright.base.records.heartbeat import HeartbeatReading
from meshwright.base.records.phases import STEP_PHASES

STATES = {
    "starting": "the first attempt has not completed a step yet",
    "progressing": "steps are completed",
    "stalled": "no rank makes progress, for longer than recent steps took",
    "waiting": "ranks wait for a named rank, for longer than recent steps took",
    "replaying": "steps are run that an earlier attempt had completed",
    "skipping": "recent updates were skipped because values were not finite",
    "restarting": "an attempt has failed, and the next has not completed a step yet",
    "complete": "the run has ended",
    "stopped": "a signal or a callback has ended the run before its last step",
    "failed": "the run has failed, or its processes are gone, and nothing restarts it",
}
"""Every state of a run, with its meaning."""
ADVANCING = ("progressing", "replaying", "skipping")
"""The states in which the remaining time is known."""

STALL_FACTOR, STALL_SECONDS, OUTSIDE_SECONDS, START_SECONDS = 10.0, 10.0, 60.0, 600.0
"""Progress is overdue after STALL_FACTOR times the longest recent step, but not before STALL_SECONDS; between two steps
(evaluation, save, callback) not before OUTSIDE_SECONDS, and before the first one not before START_SECONDS."""
SKIP_WINDOW, SKIPS = 8, 2
"""The newest steps of which so many skipped ones make the state "skipping"."""
STRAGGLER_STEPS = 60
"""A straggler is named for this many steps after it was found."""


@dataclass(frozen=True)
class ProgressSignal:
    """How far the run is, and how fast it advances."""

    done: int
    steps: int
    steps_per_second: float | None
    samples_per_second: float | None
    """unique samples per second over the newest steps"""
    tokens_per_second: float | None
    eta_seconds: float | None
    goodput: float | None
    """unique samples that survived, per second of wall time since the run began"""


@dataclass(frozen=True)
class CommunicationSignal:
    """What communication costs rank 0 in the newest steps."""

    exposed_seconds: float | None
    """per step, mean of the newest timed steps"""
    share: float | None
    """of the step time"""
    source: str
    """how it was measured"""


@dataclass(frozen=True)
class RecoverySignal:
    """What a failure would cost now."""

    checkpoint_step: int | None
    """completed steps in the newest verified checkpoint; None if there is none"""
    checkpoint_age_seconds: float | None
    steps_at_risk: int
    """completed steps that no checkpoint contains"""
    seconds_at_risk: float | None
    """the time that these steps took"""
    restarts: int
    """attempts that followed a failure"""


@dataclass(frozen=True)
class Signals:
    """The headline signals of a run at one moment."""

    state: str
    sentence: str
    rank: int | None
    """the rank that is waited for or slow, if one can be named"""
    progress: ProgressSignal
    communication: CommunicationSignal
    recovery: RecoverySignal
    quiet_seconds: float | None
    """seconds since the newest record or sign of life"""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_signals(history: RunHistory, now: float, account: GoodputAccount | None = None) -> Signals:
    """The signals at `now`, in Unix seconds; `account` is the goodput account if it has been made."""
    account = account or goodput(history, now)
    table = history.steps()
    attempt = history.measured_attempt.number if history.measured_attempt is not None else -1
    recent, timed = table.recent().of_attempt(attempt), table.recent_timed().of_attempt(attempt)
    progress = read_progress(history, recent, account)
    state, sentence, rank = read_state(history, recent, now)
    quiet = max(0.0, now - history.newest_record) if history.newest_record is not None else None
    return Signals(
        state, sentence, rank, progress, read_communication(timed), read_recovery(history, table, now), quiet
    )


def read_progress(history: RunHistory, recent: StepTable, account: GoodputAccount) -> ProgressSignal:
    attempt = located_attempt(history)
    done, steps = (attempt.done if attempt else 0), history.total_steps
    rate = samples = tokens = eta = None
    if len(recent):
        span = span_seconds(recent)
        rate = len(recent) / span
        samples, tokens = float(np.nansum(recent.samples)) / span, float(np.nansum(recent.tokens)) / span
        eta = (steps - done) / rate if steps > done else 0.0
    return ProgressSignal(done, steps, rate, samples, tokens, eta, account.samples_per_second)


def located_attempt(history: RunHistory) -> AttemptHistory | None:
    """The newest attempt of which it is known where it resumes; a later one has not restored its checkpoint yet."""
    known = (one for one in reversed(history.attempts) if one.steps_recorded or one.restored)
    return next(known, history.newest_attempt)


def span_seconds(rows: StepTable) -> float:
    """The seconds from the begin of the first to the end of the last row, with what happened between them."""
    span = float(rows.end[-1] - rows.begin[0])
    return span if np.isfinite(span) and span >= float(rows.seconds.max()) else float(rows.seconds.sum())


def read_communication(rows: StepTable) -> CommunicationSignal:
    if not len(rows) or np.isnan(rows.exposed).all():
        return CommunicationSignal(None, None, rows.exposed_source)
    exposed = float(np.nanmean(rows.exposed))
    return CommunicationSignal(exposed, min(1.0, exposed / float(rows.seconds.mean())), rows.exposed_source)


def read_recovery(history: RunHistory, table: StepTable, now: float) -> RecoverySignal:
    attempt = located_attempt(history)
    done = attempt.done if attempt else 0
    usable = [found for found in history.checkpoints if found.state == "published" and found.step <= done]
    newest = usable[-1] if usable else None
    step, saved = (newest.step, newest.time) if newest else (0, None)
    rows = table.of_attempt(attempt.number) if attempt else table
    rows = rows.select(rows.step >= step)
    return RecoverySignal(
        newest.step if newest else None,
        max(0.0, now - saved) if saved is not None else None,
        max(0, done - step),
        span_seconds(rows) if len(rows) else 0.0,
        sum(earlier.outcome in FAILURES for earlier in history.attempts[:-1]),
    )


def read_state(history: RunHistory, recent: StepTable, now: float) -> tuple[str, str, int | None]:
    """(state, sentence, rank that is waited for or slow)."""
    attempt = history.newest_attempt
    if attempt is None:
        return "starting", "No attempt is on record yet.", None
    if (ended := ended_state(history, attempt, now)) is not None:
        return ended
    if (overdue := overdue_state(history, recent, now)) is not None:
        return overdue
    if not attempt.steps_recorded:
        return starting_state(history, attempt)
    where = f"{attempt.done:,} of {history.total_steps:,} steps are done"
    newest = recent.select(slice(-SKIP_WINDOW, None))
    skipped = newest.step[newest.skipped]
    if len(skipped) >= SKIPS:
        text = f"The updates of {len(skipped)} of the last {len(newest)} steps were skipped, last at step {skipped[-1]}"
        return "skipping", f"{text}: values were not finite.", None
    reached = max((earlier.done for earlier in history.attempts[:-1]), default=0)
    if attempt.done < reached:
        text = f"Attempt {attempt.number} repeats steps {attempt.first_step} to {reached - 1}, completed before"
        return "replaying", f"{text}; {where}.", None
    slow = [found for found in history.stragglers if found["attempt"] == attempt.number]
    slow = [found for found in slow if found["step"] >= attempt.done - STRAGGLER_STEPS]
    if slow:
        slowest = max(slow, key=lambda found: found["seconds"] or 0.0)
        factor, rank, phase = slowest["factor"] or 1.0, slowest["rank"], slowest["phase"]
        text = f"Rank {rank} is slow: {factor:.1f} times the others, most of it in {phase}"
        return "progressing", f"{text}; {where}.", rank
    return "progressing", f"{where}.", None


def ended_state(history: RunHistory, attempt: AttemptHistory, now: float) -> tuple[str, str, int | None] | None:
    """The state of a run of which no attempt runs; None if one does."""
    outcome = attempt.outcome
    if outcome == "running":
        return None
    newest = history.newest_record
    ago = f"{format_clock(now - newest)} ago" if newest is not None else "at an unknown time"
    done = f"{(located_attempt(history) or attempt).done:,} of {history.total_steps:,} steps done"
    incident = attempt.incident
    message = incident.message.splitlines()[0] if incident and incident.message else ""
    if outcome == "complete":
        return "complete", f"The run ended {ago}, {done}.", None
    if outcome == "stopped":
        reason = message or (attempt.end or {}).get("stopped", "")
        return "stopped", f"The run was stopped {ago}, {done}" + (f": {reason}." if reason else "."), None
    if outcome == "resized":
        return "restarting", f"Attempt {attempt.number} ended after a checkpoint, {done}: {message}.", None
    rank = incident.rank if incident else None
    location = f"rank {rank} at step {incident.step}, {incident.phase}" if incident and rank is not None else "attempt"
    location = f"host {incident.host}, {location}" if incident and incident.host else location
    if history.is_restarting(now):
        return "restarting", f"Attempt {attempt.number} failed ({location}: {message}); the job restarts.", rank
    if outcome == "lost":
        text = f"No process of attempt {attempt.number} runs, and nothing recorded why; the newest record is from {ago}"
        return "failed", f"{text}, {done}.", None
    return "failed", f"Attempt {attempt.number} failed {ago} ({location}: {message}), {done}.", rank


def starting_state(history: RunHistory, attempt: AttemptHistory) -> tuple[str, str, int | None]:
    """The state of an attempt before its first completed step."""
    phases = sorted({reading.phase for reading in history.heartbeats.values()})
    where = f"the ranks are in {', '.join(phases)}" if phases else "no rank has started yet"
    if attempt.restart or any(earlier.steps_recorded for earlier in history.attempts[:-1]):
        return "restarting", f"Attempt {attempt.number} starts: {where}.", None
    return "starting", f"Attempt {attempt.number} has not completed a step yet: {where}.", None


def overdue_state(history: RunHistory, recent: StepTable, now: float) -> tuple[str, str, int | None] | None:
    """Whether progress is overdue, and for which rank the others wait."""
    heartbeats = {rank: reading for rank, reading in history.heartbeats.items() if reading.phase != "end"}
    quiet = quiet_seconds(history, now)
    outside = any(reading.phase not in STEP_PHASES for reading in heartbeats.values())
    limit = max(STALL_SECONDS, OUTSIDE_SECONDS if outside else 0.0) if len(recent) else START_SECONDS
    if quiet <= max(limit, STALL_FACTOR * float(recent.seconds.max(initial=0.0))):
        return None
    waiting = {rank for rank, reading in heartbeats.items() if reading.waiting or reading.phase == "sync"}
    order = {rank: (reading.collective_count, reading.step, rank) for rank, reading in heartbeats.items()}
    busy = sorted(set(heartbeats) - waiting, key=order.__getitem__)
    since = format_seconds(quiet)
    if waiting and busy:
        who = f"Rank {min(waiting)} has" if len(waiting) == 1 else f"{len(waiting)} ranks have"
        text = f"{who} waited for rank {busy[0]} for {since}"
        return "waiting", f"{text}: it is at {heartbeats[busy[0]].location}.", busy[0]
    where = describe_locations(heartbeats)
    return "stalled", f"No rank has made progress for {since}: {where}.", None


def quiet_seconds(history: RunHistory, now: float) -> float:
    """Seconds since the newest record, or since a rank entered a phase or advanced its beat counter."""
    signs = [now - history.newest_record] if history.newest_record is not None else []
    clock = time.monotonic()
    signs += [clock - advanced for advanced in history.liveness.advanced.values()]
    if history.liveness.on_this_host:
        # The monotonic clock is that of the host: a rank on another one has another clock, and no process here.
        local = [reading for reading in history.heartbeats.values() if reading.is_alive]
        signs += [clock - reading.phase_entered / 1e9 for reading in local]
    return max(0.0, min(signs, default=0.0))


def describe_locations(heartbeats: dict[int, HeartbeatReading]) -> str:
    """Where the ranks are: the same place for all, or the one that is behind."""
    if not heartbeats:
        return "no rank has a heartbeat"
    rank = min(heartbeats, key=lambda one: (heartbeats[one].step, heartbeats[one].collective_count, one))
    places = {reading.location for reading in heartbeats.values()}
    return f"{'every rank' if len(places) == 1 else f'rank {rank}'} is at {heartbeats[rank].location}"
