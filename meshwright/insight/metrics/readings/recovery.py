"""Reads the metrics of checkpoints, restarts and failures from a snapshot of a run. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.base.history.checkpoints import CheckpointHistory
from meshwright.insight.metrics.metric import Reading, Snapshot


def checkpoint_age(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.signals.recovery.checkpoint_age_seconds


def checkpoint_step(snapshot: Snapshot) -> Iterator[Reading]:
    step = snapshot.signals.recovery.checkpoint_step
    yield (), float(step) if step is not None else None


def steps_at_risk(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.signals.recovery.steps_at_risk)


def seconds_at_risk(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.signals.recovery.seconds_at_risk


def restarts(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.signals.recovery.restarts)


def newest_saved(snapshot: Snapshot) -> CheckpointHistory | None:
    """The checkpoint that was published last."""
    saved = [found for found in snapshot.history.checkpoints if found.time is not None]
    return max(saved, key=lambda found: found.time or 0.0, default=None)


def checkpoint_bytes(snapshot: Snapshot) -> Iterator[Reading]:
    newest = newest_saved(snapshot)
    yield (), newest.bytes if newest else None


def save_seconds(snapshot: Snapshot) -> Iterator[Reading]:
    newest = newest_saved(snapshot)
    yield (), newest.seconds if newest else None


def stall_seconds(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), sum(found.stall_seconds or 0.0 for found in snapshot.history.checkpoints)


def published_checkpoints(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(len(snapshot.history.checkpoints))


def save_failures(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.history.save_failures.total)


def hangs(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.history.hangs.total)


def callback_failures(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.history.callback_failures.total)


def lost_events(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(sum(reading.lost_events for reading in snapshot.history.heartbeats.values()))
