"""Reads the metrics of progress, step time, numerics and goodput from a snapshot of a run. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.base.history.goodput import PARTS
from meshwright.base.history.rank_steps import STEP_SECONDS
from meshwright.base.history.signals import STATES
from meshwright.base.records.untrusted_records import finite_number
from meshwright.insight.metrics.metric import Histogram, Reading, Snapshot, mean

INFO = ("device", "layout", "shard", "precision", "batch", "torch", "meshwright")
"""Fields of the start record that the info metric has as labels."""


def info(snapshot: Snapshot) -> Iterator[Reading]:
    attempt = snapshot.history.newest_attempt
    start = attempt.start if attempt is not None else {}
    yield (snapshot.run_id, *(str(start.get(name, "")) for name in INFO)), 1.0


def state(snapshot: Snapshot) -> Iterator[Reading]:
    for name in STATES:
        yield (name,), float(snapshot.signals.state == name)


def alive(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.history.is_alive)


def ranks(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(len(snapshot.ranks))


def completed_steps(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.signals.progress.done)


def planned_steps(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.signals.progress.steps)


def steps_per_second(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.signals.progress.steps_per_second


def tokens_per_second(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.signals.progress.tokens_per_second


def samples_per_second(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.signals.progress.samples_per_second


def goodput_samples_per_second(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.signals.progress.goodput


def eta(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.signals.progress.eta_seconds


def goodput_parts(snapshot: Snapshot) -> Iterator[Reading]:
    for part in PARTS:
        yield (part,), snapshot.account.parts.get(part, 0.0)


def goodput_ratio(snapshot: Snapshot) -> Iterator[Reading]:
    wall = snapshot.account.wall_seconds
    yield (), snapshot.account.parts["productive"] / wall if wall > 0 else None


def executed_steps(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.history.totals.steps)


def executed_tokens(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.history.totals.tokens


def executed_samples(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.history.totals.samples


def step_seconds(snapshot: Snapshot) -> Iterator[Reading]:
    totals = snapshot.history.totals
    bounds = (*STEP_SECONDS, float("inf"))
    yield (), Histogram(tuple(zip(bounds, totals.buckets.tolist(), strict=True)), totals.seconds)


def mfu(snapshot: Snapshot) -> Iterator[Reading]:
    """Model FLOPs per second of step time as a share of the peak, which is known only for devices with a peak."""
    plan = snapshot.history.plan
    flops, peak = finite_number(plan.get("flops")), finite_number(plan.get("peak_flops"))
    seconds = mean(snapshot.recent(0).seconds)
    yield (), flops / seconds / peak if flops and peak and seconds else None


def loss(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.newest("loss")


def evaluation_loss(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.history.evaluations[-1]["loss"] if snapshot.history.evaluations else None


def grad_norm(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.newest("grad_norm")


def learning_rate(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.newest("lr")


def loss_scale(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.newest("loss_scale")


def noise_scale(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), snapshot.newest("noise_scale")


def skipped_steps(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.history.totals.skipped)


def bad_samples(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.history.bad_samples.total)


def nonfinite(snapshot: Snapshot) -> Iterator[Reading]:
    yield (), float(snapshot.history.nonfinite.total)
