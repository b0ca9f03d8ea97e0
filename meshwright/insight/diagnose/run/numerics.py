"""Numerics: overflow and underflow in fp16, values that are not finite, loss spikes, and divergence. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import StepTable
from meshwright.base.records.untrusted_records import bounded_object, finite_number
from meshwright.insight.diagnose.finding import Change, Confidence, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.loss_trend import (
    SMOOTHED_STEPS,
    SPIKE_DEVIATIONS,
    Divergence,
    Spike,
    find_divergence,
    find_spikes,
)

MIN_SHARE = 0.03
"""The share of steps from which on skipped updates and zero gradients are reported."""
MIN_SKIPPED = 2
EARLY_STEPS = 10
"""The first steps of a run, in which the loss changes so fast that a spike says nothing."""
RAISED = 2.0
"""A schedule that raises the learning rate by this factor is reported."""
LOWERED = 0.9
"""A rate below this share of one at which the loss did not diverge is not blamed for a divergence."""
GROWN_NORM = 10.0
"""A gradient norm that has grown by this factor supports a divergence."""


def find(history: RunHistory) -> Iterator[Finding]:
    """The findings on numbers, from the steps that survived."""
    table = history.steps().survived()
    if not len(table):
        return
    divergence = find_divergence(table.loss)
    if divergence is not None:
        yield describe_divergence(history, table, divergence)
    elif history.nonfinite:
        yield describe_nonfinite(history, table)
    yield from find_loss_scale(table)
    last = divergence.index if divergence is not None else len(table)
    before = table.select(slice(0, last))
    spikes = [s for s in find_spikes(before.loss, before.grad_norm) if before.step[s.index] >= EARLY_STEPS]
    if spikes:
        yield describe_spikes(before, spikes)


def describe_divergence(history: RunHistory, table: StepTable, divergence: Divergence) -> Finding:
    index = divergence.index
    step, rate = int(table.step[index]), rate_in_effect(table, index, SMOOTHED_STEPS)
    worked = rate_in_effect(table, max(0, index - SMOOTHED_STEPS - 1), index)
    is_blamed = rate > 0 and rate >= LOWERED * worked
    configured = finite_number(bounded_object(history.config.get("optimizer")).get("lr")) or 0.0
    setting = configured if configured > 0 else rate
    raised = f", {rate / setting:.0f} times optimizer.lr by the schedule," if rate > RAISED * setting else ""
    norms = table.grad_norm
    before, after = finite_median(norms[: max(1, index)]), finite_median(norms[index:])
    grown = before > 0 and after / before >= GROWN_NORM
    evidence = []
    if np.isfinite(divergence.after):
        evidence.append(
            MeasuredFigure("median loss since", divergence.after, "", divergence.before, "the lowest before")
        )
    if np.isfinite(after) and np.isfinite(before):
        evidence.append(MeasuredFigure("median gradient norm since", after, "", before, "before"))
    broken = int(np.sum(~np.isfinite(table.loss[index:])))
    if broken:
        evidence.append(MeasuredFigure("steps whose loss is not finite", broken, "count"))
    to = f"rises to {divergence.after:.4g} and stays there" if np.isfinite(divergence.after) else "is not finite"
    confidence: Confidence = "high" if grown or broken or divergence.after > 2 * abs(divergence.before) else "medium"
    verdict = f"; the learning rate {rate:.3g}{raised} is too high"
    samples = ""
    if not is_blamed:
        confidence = "medium" if confidence == "high" else "low"
        below = f"; the learning rate {rate:.3g} is below {worked:.3g}, at which the loss did not diverge"
        verdict = below if rate > 0 else ""
        samples = f"look at the samples of the steps before {step}; "
    return Finding(
        "numerics",
        "divergence",
        f"the loss diverges from step {step} on: it was {divergence.before:.4g} and {to}{verdict}",
        (len(table) - index) / len(table),
        confidence,
        step=step,
        evidence=tuple(evidence),
        change=Change(
            # The schedule multiplies the setting: a tenth of it is a tenth of the rate in effect at every step.
            (f"optimizer.lr = {min(setting / 10, rate / 2):.2g}",) if is_blamed else (),
            f"{samples}a longer schedule.warmup, or optimizer.clip = 1 if clipping is off, may be enough",
        ),
        check=f"meshwright replay RUN --step {max(0, step - 1)}",
    )


def describe_nonfinite(history: RunHistory, table: StepTable) -> Finding:
    first = min(history.nonfinite, key=lambda event: (event["step"], not event["module"], event["rank"]))
    step, module = first["step"], first["module"]
    where = f"first in {module} on rank {first['rank']}" if module else "first in the sum over ranks"
    what = "the gradient" if first["loss"] is not None else "the loss"
    steps = {event["step"] for event in history.nonfinite}
    return Finding(
        "numerics",
        "non-finite",
        f"{what} of step {step} is not finite, {where}",
        len(steps) / max(len(table), len(steps)),
        "high" if module else "medium",
        rank=first["rank"],
        step=step,
        evidence=(MeasuredFigure("steps with values that are not finite", len(steps), "count"),),
        change=Change(action=f"look at the samples of step {step} and the outputs of its modules, which replay shows"),
        check=f"meshwright replay RUN --step {step}",
    )


def find_loss_scale(table: StepTable) -> Iterator[Finding]:
    """Overflow and underflow under fp16's loss scale. A skipped step whose loss is finite is an overflow."""
    scale = table.loss_scale
    scaled = np.isfinite(scale)
    if not scaled.any():
        return
    overflow = table.skipped & scaled & np.isfinite(table.loss)
    steps, count = len(table), int(overflow.sum())
    first, last = float(scale[scaled][0]), float(scale[scaled][-1])
    if count >= MIN_SKIPPED and count / steps >= MIN_SHARE:
        step = int(table.step[np.flatnonzero(overflow)[0]])
        good = scale[scaled & ~table.skipped & (scale > 0)]
        settled = len(good) and not overflow[-1]
        start = f"precision.loss_scale = {2.0 ** np.floor(np.log2(good[-1]))}" if settled else ""
        yield Finding(
            "numerics",
            "overflow",
            f"{count} of {steps} updates are skipped because fp16 gradients overflow, from step {step} on; the loss "
            f"scale falls from {first:.4g} to {last:.4g}",
            count / steps,
            "high",
            step=step,
            evidence=(
                MeasuredFigure("skipped updates", count, "count", 0.0, "expected"),
                MeasuredFigure("loss scale at the end", last, "", first, "at the start"),
            ),
            change=Change(
                tuple(filter(None, (start, 'precision.compute = "bf16"' if not settled else ""))),
                "bf16 needs no loss scale, where the device supports it",
            ),
            check="meshwright report RUN",
        )
    zero = scaled & (table.grad_norm == 0) & ~table.skipped
    if (vanished := int(zero.sum())) >= MIN_SKIPPED and vanished / steps >= MIN_SHARE:
        step = int(table.step[np.flatnonzero(zero)[0]])
        yield Finding(
            "numerics",
            "underflow",
            f"the gradient of {vanished} of {steps} steps is zero, from step {step} on: fp16 underflows at the loss "
            f"scale {last:.4g}",
            vanished / steps,
            "high",
            step=step,
            evidence=(MeasuredFigure("steps whose gradient is zero", vanished, "count", 0.0, "expected"),),
            change=Change((f"precision.loss_scale = {max(65536.0, last * 1024)}",), "bf16 needs no loss scale"),
            check="meshwright report RUN",
        )


def describe_spikes(table: StepTable, spikes: list[Spike]) -> Finding:
    first = spikes[0]
    step, loss = int(table.step[first.index]), float(table.loss[first.index])
    others = sorted(int(table.step[spike.index]) for spike in spikes[1:])
    also = f"; also step{'s' if len(others) > 1 else ''} {', '.join(map(str, others[:6]))}" if others else ""
    rate, usual = (rate_in_effect(table, first.index - back, reach) for back, reach in ((0, 1), (2, 2)))
    raised = ""
    if rate > RAISED * usual > 0:
        raised = f"the schedule raises the learning rate from {usual:.3g} to {rate:.3g} there; "
    clear = max(first.norm_deviations, first.deviations / 2) >= SPIKE_DEVIATIONS
    return Finding(
        "numerics",
        "loss spike",
        f"the loss of step {step} is {loss:.4g} where the steps around it predict {first.expected:.4g}{also}",
        len(spikes) / len(table),
        "high" if clear else "medium",
        step=step,
        evidence=(
            MeasuredFigure(f"loss of step {step}", loss, "", first.expected, "predicted by the steps around it"),
            MeasuredFigure("robust deviations of the loss", first.deviations, "", 0.0, "expected"),
            MeasuredFigure("robust deviations of the gradient norm", first.norm_deviations, "", 0.0, "expected"),
        ),
        change=Change(
            action=f"{raised}replay of step {step} shows the loss of every sample, and names the one to blame"
        ),
        check=f"meshwright replay RUN --step {step}",
    )


def rate_in_effect(table: StepTable, index: int, reach: int) -> float:
    """The largest learning rate of a step and the `reach` steps before it, whose updates its loss depends on."""
    return float(np.max(np.nan_to_num(table.lr[max(0, index - reach) : index + 1])))


def finite_median(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")
