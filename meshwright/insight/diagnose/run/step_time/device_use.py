"""An under-used device: the passes take much longer than their FLOPs explain, although nobody waits. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.untrusted_records import bounded_object, finite_number
from meshwright.insight.diagnose.finding import Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.timed_steps import LIMITING_SHARE, TimedSteps, timed_steps

SLOWER_THAN_PREDICTED = 2.0
"""The passes take this many times the prediction: more than its 80 % interval."""
SMALL_MICRO_BATCH = 2048
"""Tokens of a micro-batch below which matrix products are too small to use a device well."""


def find(history: RunHistory) -> Iterator[Finding]:
    steps = timed_steps(history)
    phases = bounded_object(history.plan.get("phases"))
    if steps is None or finite_number(history.plan.get("seconds")) is None or not phases:
        return
    predicted = sum(finite_number(phases.get(name)) or 0.0 for name in ("forward", "backward", "recompute"))
    measured = float(np.median(steps.local_seconds("forward", "backward").max(axis=0)))
    share = (measured - predicted) / steps.duration
    if predicted <= 0 or measured < SLOWER_THAN_PREDICTED * predicted or share < LIMITING_SHARE:
        return
    variant, why, change = cause(steps)
    flops, peak = finite_number(history.plan.get("flops")), finite_number(history.plan.get("peak_flops"))
    figures = [MeasuredFigure("seconds of forward and backward", measured, "s", predicted, "the prediction")]
    if flops and peak:
        predicted_mfu = finite_number(history.plan.get("mfu"))
        figures.append(MeasuredFigure("MFU", flops / peak / steps.duration, "share", predicted_mfu, "the prediction"))
    yield Finding(
        "device",
        variant,
        f"forward and backward take {measured / predicted:.1f} times what the device needs for their FLOPs: {why}",
        share,
        "medium" if change.settings else "low",
        phase="forward",
        evidence=tuple(figures),
        change=change,
        check="meshwright diagnose RUN --try" if change.settings else "meshwright train --profile 10:13",
    )


def cause(steps: TimedSteps) -> tuple[str, str, Change]:
    """The likely reason, as far as the settings tell: (variant, sentence, change)."""
    tokens = steps.batch.micro * steps.config.data.sequence // steps.layout.context
    if tokens < SMALL_MICRO_BATCH and steps.batch.accumulation > 1 and steps.layout.pipeline == 1:
        micro = next(m for m in range(2 * steps.batch.micro, steps.batch.local + 1) if steps.batch.local % m == 0)
        return (
            "small kernels",
            f"a micro-batch has {tokens:,} tokens, and {steps.batch.accumulation} of them make a step",
            Change((f"batch.micro = {micro}",)),
        )
    if steps.config.model.width % 8 or steps.config.model.vocab % 8:
        return (
            "bad shapes",
            "model.width or model.vocab is no multiple of 8, which matrix units need",
            Change(action="choose sizes that are multiples of 64; this changes the numbers"),
        )
    if not steps.config.compile.enabled and not steps.is_cpu:
        return "host-bound launch", "the host launches kernel by kernel", Change(("compile.enabled = true",))
    return (
        "unknown",
        "another process uses it, or its clock rate is low",
        Change(action="look at the device and its host; a profile of a few steps shows the kernels"),
    )
