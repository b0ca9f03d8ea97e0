"""Communication of one rank that is exposed: which collective, and why nothing overlaps it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.base.io import format_bytes, format_seconds
from meshwright.insight.diagnose.finding import LIMITING_SHARE, Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.trace.breakdown import Breakdown
from meshwright.insight.diagnose.trace.collective_calls import CollectiveCalls, group_axes
from meshwright.insight.diagnose.trace.kineto.event_table import Mask
from meshwright.insight.diagnose.trace.rank_findings import CHECK, confidence
from meshwright.insight.diagnose.trace.rank_summary import RankSummary

MANY = 32
"""Collectives of one kind per step above which small ones are worth joining."""
SMALL_BYTES, SMALL_MICROSECONDS = 1 << 20, 200.0
"""A collective below these sizes is bound by latency; the duration counts if the size is not recorded."""
SMALL_QUANTILE = 0.3
"""Where parameters are reduced one by one, weights are large and biases are small."""
LATENCY_BOUND = ("not bucketed", "small buckets")
SLOW_LINK = 1.5
"""Communication to compute above which no overlap could hide most of it."""
LITTLE_OVERLAP = 0.1
LATE_START = 0.9
"""Share of a step's compute before the first collective above which it starts late."""

CHANGES = {
    "not bucketed": "join gradients into buckets that are reduced while backward runs: "
    "DistributedDataParallel(bucket_cap_mb=25) instead of one all-reduce per parameter after backward",
    "small buckets": "larger buckets: DistributedDataParallel(bucket_cap_mb=25), or larger FSDP units",
    "one bucket": "several buckets, the first of which is reduced while backward goes on: "
    "DistributedDataParallel(bucket_cap_mb=25)",
    "late start": "start collectives during backward: reduce gradients with DistributedDataParallel or FSDP2, "
    "and prefetch parameters (set_modules_to_backward_prefetch)",
    "no overlap": "start collectives earlier and wait for them later (async_op=True, prefetching of FSDP2), "
    "on a stream of their own",
    "partial overlap": "more compute beside each collective (larger micro-batches, deeper prefetching), or fewer bytes "
    "(bfloat16 gradients, fewer FSDP all-gathers)",
    "slow link": "fewer bytes (bfloat16 gradients, gradient accumulation with no_sync), a faster link, or a layout "
    "that keeps this traffic within a host",
}
"""Variant -> what to change in any trainer."""
DDP_AXES = {"replicate", "context", "optimizer"}
"""Axes of a run of Meshwright that reduces its gradients with DDP; with any other axis it uses FSDP2."""
BUCKETS = 8
"""Buckets into which the gradients of one or a few late ones are divided."""
MIB = 1 << 20


def find_communication(summary: RankSummary, waited: float) -> Iterator[Finding]:
    """Names the collective with the most exposed time, apart from send and receive, which belong to pipelines.

    Args:
        summary: the rank.
        waited: seconds in which it waits for ranks that arrive later; that is no fault of its communication.
    """
    breakdown, calls, steps = summary.breakdown, summary.calls, summary.step_count
    issue = breakdown.idle_causes.get("collective issue", 0.0)
    point_to_point = float(calls.exposed[calls.of_kind("send/recv")].sum()) / 1e6
    exposed = max(0.0, breakdown.exposed - point_to_point - waited)
    kinds = [kind for kind in dict.fromkeys(calls.kind) if kind != "send/recv"]
    if not kinds:
        return
    kind = max(kinds, key=lambda kind: calls.exposed[calls.of_kind(kind)].sum())
    chosen = calls.of_kind(kind)
    variant = explain(summary, kind, waited)
    share = breakdown.share(avoidable(breakdown, variant, exposed) + issue)
    if share < LIMITING_SHARE:
        return
    axis = next((axis for axis, is_chosen in zip(calls.axis, chosen, strict=True) if is_chosen and axis), "")
    evidence = [
        MeasuredFigure(f"{kind} calls per step", float(chosen.sum()) / steps, "count"),
        MeasuredFigure(f"median {kind}", float(np.median(calls.duration[chosen])) / 1e6, "s"),
        MeasuredFigure("exposed communication per step", exposed / steps, "s", breakdown.seconds / steps, "step time"),
        MeasuredFigure("overlapped by compute", breakdown.overlap, "share"),
    ]
    sizes = calls.message_bytes[chosen & (calls.message_bytes > 0)]
    if len(sizes):
        evidence.insert(1, MeasuredFigure(f"median message of {kind}", float(np.median(sizes)), "B"))
        timed = chosen & (calls.message_bytes > 0) & (calls.duration > 0)
        rate = calls.message_bytes[timed].sum() / max(calls.duration[timed].sum(), 1e-9) * 1e6
        evidence.append(MeasuredFigure(f"message bytes per second of {kind}", float(rate), "B/s"))
    if breakdown.share(issue) >= 0.01:
        evidence.append(MeasuredFigure("idle between successive collectives, per step", issue / steps, "s"))
    if breakdown.share(waited) >= 0.01:
        evidence.append(MeasuredFigure("waiting for ranks that arrive later, per step", waited / steps, "s"))
    yield Finding(
        "communication",
        variant,
        sentence(
            describe(kind, calls, chosen, steps, axis), variant, breakdown.share(exposed + issue), breakdown.overlap
        ),
        share,
        "medium" if variant == "slow link" else confidence(share),
        rank=summary.rank,
        axis=axis,
        phase="backward" if kind in ("all-reduce", "reduce-scatter") else "",
        evidence=tuple(evidence),
        change=Change(settings(summary, kind, axis, variant), CHANGES[variant]),
        check=CHECK,
    )


def settings(summary: RankSummary, kind: str, axis: str, variant: str) -> tuple[str, ...]:
    """Lines of a run file for a trace of Meshwright: those of DDP for its all-reduces, those of FSDP2 for its
    all-gathers. Other axes have no setting that helps.
    """
    names = {name for axes in group_axes(summary.header).values() for name in axes.split("+")}
    if kind == "all-gather" and "shard" in axis.split("+") and variant not in (*LATENCY_BOUND, "slow link"):
        return ("fsdp.prefetch = 2",)
    if kind != "all-reduce" or "replicate" not in axis.split("+") or not names <= DDP_AXES:
        return ()
    if variant in LATENCY_BOUND:
        return ("ddp.bucket_cap_mb = 25.0",)
    calls = summary.calls
    gradients = float(calls.message_bytes[calls.of_kind(kind)].sum()) / summary.step_count / MIB
    if variant in ("one bucket", "late start") and gradients >= BUCKETS:
        return (f"ddp.bucket_cap_mb = {min(25.0, round(gradients / BUCKETS, 1))}",)
    return ()


def avoidable(breakdown: Breakdown, variant: str, exposed: float) -> float:
    """Seconds of exposed communication that the change can win back.

    Overlap hides communication behind the compute that is not used for that yet; a link of twice the rate saves half.
    """
    if variant in LATENCY_BOUND:
        return exposed
    return exposed / 2 if variant == "slow link" else min(exposed, breakdown.compute - breakdown.overlapped)


def explain(summary: RankSummary, kind: str, waited: float) -> str:
    """Tells why the collectives of a kind are exposed."""
    calls, breakdown = summary.calls, summary.breakdown
    chosen = calls.of_kind(kind)
    per_step = float(chosen.sum()) / summary.step_count
    sizes = calls.message_bytes[chosen & (calls.message_bytes > 0)]
    typical, small = (sizes, SMALL_BYTES) if len(sizes) else (calls.duration[chosen], SMALL_MICROSECONDS)
    is_small = np.quantile(typical, SMALL_QUANTILE) < small
    duration, exposed = calls.duration[chosen].sum(), calls.exposed[chosen].sum()
    overlap = 1 - exposed / duration if duration else 0.0
    if per_step >= MANY and is_small:
        return "not bucketed" if overlap < LITTLE_OVERLAP else "small buckets"
    if breakdown.communication - waited > SLOW_LINK * breakdown.compute:
        return "slow link"
    if overlap >= LITTLE_OVERLAP:
        return "partial overlap"
    if kind == "all-reduce" and per_step < 1.5 and not is_small:
        return "one bucket"
    before = [
        summary.compute.clip(low, float(starts.min())).total / max(summary.compute.clip(low, high).total, 1e-9)
        for low, high in summary.first_windows
        if len(starts := calls.start[chosen & (calls.start >= low) & (calls.start < high)])
    ]
    return "late start" if before and np.median(before) > LATE_START else "no overlap"


def describe(kind: str, calls: CollectiveCalls, chosen: Mask, steps: int, axis: str) -> str:
    """The number, size and duration of the chosen collectives."""
    sizes = calls.message_bytes[chosen & (calls.message_bytes > 0)]
    size = f" of {format_bytes(float(np.median(sizes)))}" if len(sizes) else ""
    median = format_seconds(float(np.median(calls.duration[chosen])) / 1e6)
    where = f" on axis {axis}" if axis else ""
    count = f"{chosen.sum() / steps:,.0f}"
    return f"{count} {kind} {'call' if count == '1' else 'calls'}{size} per step (median {median}){where}"


def sentence(subject: str, variant: str, share: float, overlap: float) -> str:
    """The verdict in one sentence."""
    reason = {
        "not bucketed": "issued one by one, in no bucket, and overlapped by nothing",
        "small buckets": "too small, so that latency dominates",
        "one bucket": "for all gradients in one bucket, which can start only when backward ends",
        "late start": "started when nearly all compute of the step is done",
        "no overlap": "while nothing is computed",
        "slow link": "longer than all compute could hide",
        "partial overlap": f"longer than the compute beside; {overlap:.0%} of communication is overlapped",
    }[variant]
    return f"Communication takes {share:.0%} of the time: {subject}, {reason}."
