"""Communication-bound steps: which collective on which axis is exposed, and why. Torch-free.

The exposed seconds of the rank that waits least are those of the transfers; what the other ranks wait longer is a
straggler's. Under a pipeline, ranks wait for micro-batches, see `bubble`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.untrusted_records import finite_number
from meshwright.base.topology.collectives import wire_bytes
from meshwright.base.topology.unsupported import divisors
from meshwright.insight.diagnose.finding import Change, Confidence, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.timed_steps import LIMITING_SHARE, TimedSteps, timed_steps

SMALL_BUCKET = 1 << 20
"""Bytes of a bucket below which its latency outweighs its transfer; DDP's own first bucket has this size."""
USEFUL_BUCKETS = 4
"""Buckets of at least SMALL_BUCKET bytes with which most of the reduction overlaps with backward."""
MANY_BUCKETS = 8
SLOW_LINK = 125e6
"""Bytes per second (1 Gbit/s) below which a link between hosts is slow, if the planner knows nothing about it."""
SLOWER_THAN_PREDICTED = 3.0
VOLUME_SHARE = 0.25
"""Exposed share above which the volume itself is reported, although nothing is wrong with buckets and links."""
MAX_GROUPS = 64
"""Ranks whose process groups are looked at; those of the others are alike."""
FAST_AXES = ("tensor", "context")
"""Axes whose collectives are on the critical path of every layer, and belong on the fastest links."""


@dataclass(frozen=True)
class Exposure:
    """The exposed communication of a run, and the axis that moves the most bytes."""

    steps: TimedSteps
    axis: str
    collective: str
    wire: float
    """bytes that one rank sends per step on this axis"""
    hosts: tuple[str, ...]
    """the hosts of a process group of this axis, if it has several"""
    predicted: float | None
    """seconds that the planner predicts for the collectives of this axis, if it did"""

    @property
    def seconds(self) -> float:
        return self.steps.communication

    @property
    def share(self) -> float:
        return self.seconds / self.steps.duration

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the exposed part: the true bandwidth is not above it."""
        return self.wire / max(1e-9, self.seconds)

    def finding(
        self, variant: str, why: str, share: float, change: Change, confidence: Confidence, *figures: MeasuredFigure
    ) -> Finding:
        return Finding(
            "communication",
            variant,
            f"the ranks wait {self.share:.0%} of the step time for {self.collective} on the axis {self.axis}: {why}",
            share,
            confidence,
            phase="sync" if self.steps.buckets else "",
            axis=self.axis,
            evidence=(
                MeasuredFigure("exposed communication per step", self.seconds, "s", self.steps.duration, "the step"),
                MeasuredFigure(f"bytes that a rank sends per step, {self.axis}", self.wire, "B"),
                *figures,
            ),
            change=change,
            check="meshwright diagnose RUN --try" if change.settings else "meshwright plan measure",
        )


def find(history: RunHistory) -> Iterator[Finding]:
    steps = timed_steps(history)
    if steps is None or len(steps.ranks) < 2 or steps.layout.pipeline > 1:
        return
    exposure = measure(history, steps)
    if exposure is None or exposure.share < LIMITING_SHARE:
        return
    for rule in (wrong_placement, slow_link, small_buckets, late_start, no_overlap, volume):
        if (found := rule(exposure)) is not None and found.share >= LIMITING_SHARE:
            yield found
            return


def measure(history: RunHistory, steps: TimedSteps) -> Exposure | None:
    """The axis with the most wire bytes: from the counters, or under DDP from its buckets."""
    volume: Counter[tuple[str, str]] = Counter()
    for axis, collective, _, wire in history.counters[0].communication if 0 in history.counters else ():
        if axis != "control":
            volume[axis, collective] += wire
    if not volume and steps.bucket_bytes:
        volume["replicate", "all_reduce"] = wire_bytes("all_reduce", int(steps.bucket_bytes), steps.layout.ranks)
    if not volume:
        return None
    by_axis: Counter[str] = Counter()
    for (axis, _), wire in volume.items():
        by_axis[axis] += wire
    axis = by_axis.most_common(1)[0][0]
    collective = max((name for name in volume if name[0] == axis), key=lambda name: volume[name])[1]
    return Exposure(steps, axis, collective, by_axis[axis], group_hosts(steps, axis), predicted_seconds(history, axis))


def group_hosts(steps: TimedSteps, axis: str) -> tuple[str, ...]:
    """The hosts of the first process group of an axis that spans several; empty if none does."""
    names = [name for name in axis.split("+") if name in steps.layout.active_axes]
    if not steps.hosts or not names:
        return ()
    for rank in range(min(steps.layout.ranks, MAX_GROUPS)):
        hosts = tuple(dict.fromkeys(steps.hosts[member] for member in steps.layout.group(rank, *names)))
        if len(hosts) > 1:
            return hosts
    return ()


def predicted_seconds(history: RunHistory, axis: str) -> float | None:
    rows = history.plan.get("communication")
    known = [
        seconds
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict)
        and row.get("axis") == axis
        and (seconds := finite_number(row.get("seconds"))) is not None
    ]
    return sum(known) if known else None


def wrong_placement(exposure: Exposure) -> Finding | None:
    """Tensor or context parallelism across hosts, while an axis with less frequent messages stays within them."""
    steps = exposure.steps
    if not exposure.hosts or exposure.axis not in FAST_AXES:
        return None
    inside = [
        axis for axis in ("shard", "replicate") if axis in steps.layout.active_axes and not group_hosts(steps, axis)
    ]
    per_host = steps.layout.ranks // len(set(steps.hosts))
    ranks = getattr(steps.layout, exposure.axis)
    degree = max(n for n in divisors(ranks) if n <= max(1, per_host))
    factor = ranks // degree
    replicate = steps.config.layout.replicate * factor
    order = "" if factor > 1 else ": number the ranks host by host"
    return exposure.finding(
        "wrong placement",
        f"its process groups span the hosts {', '.join(exposure.hosts[:4])}, and every layer waits for them",
        exposure.share * (1 - 1 / max(2, factor)),
        Change(
            (f"layout.{exposure.axis} = {degree}", f"layout.replicate = {replicate}") if factor > 1 else (),
            f"keep the axis {exposure.axis} within a host" + (f" instead of {inside[0]}" if inside else "") + order,
        ),
        "high",
    )


def slow_link(exposure: Exposure) -> Finding | None:
    """A link between hosts that is slower than the planner predicts, or than any network for training."""
    if not exposure.hosts or exposure.wire < SMALL_BUCKET:
        return None
    if exposure.predicted is not None:
        expected = exposure.wire / max(1e-9, exposure.predicted)
        is_slow, source = exposure.bandwidth < expected / SLOWER_THAN_PREDICTED, "the prediction"
    else:
        expected, source = SLOW_LINK, "1 Gbit/s"
        is_slow = exposure.bandwidth < expected
    if not is_slow:
        return None
    win = exposure.share * (1 - exposure.bandwidth / expected)
    return exposure.finding(
        "slow link",
        f"the link from {' to '.join(exposure.hosts[:2])} passes {exposure.bandwidth * 8 / 1e6:,.0f} Mbit/s at most",
        win,
        Change(
            action="look at the link: its negotiated rate, other traffic, and whether GLOO_SOCKET_IFNAME or "
            "NCCL_SOCKET_IFNAME names the fast interface; until then, more samples per step per byte "
            "(a larger batch.global), or ddp.comm_hook = bf16_compress"
        ),
        "high",
        MeasuredFigure(f"bandwidth, {exposure.axis}", exposure.bandwidth, "B/s", expected, source),
    )


def small_buckets(exposure: Exposure) -> Finding | None:
    steps = exposure.steps
    if steps.buckets < MANY_BUCKETS or steps.bucket_bytes / steps.buckets >= SMALL_BUCKET:
        return None
    needed = max(1, round(steps.bucket_bytes / SMALL_BUCKET))
    if steps.config.ddp.bucket_cap_mb >= 1 or steps.buckets < 2 * needed:
        return None
    return exposure.finding(
        "small buckets",
        f"{steps.buckets:.0f} buckets of {steps.bucket_bytes / steps.buckets / 1024:.0f} KiB each pay the latency of "
        "an all-reduce",
        exposure.share * (1 - needed / steps.buckets),
        Change((f"ddp.bucket_cap_mb = {bucket_cap(steps)}",)),
        "high",
        MeasuredFigure("buckets per step", steps.buckets, "count", float(needed), "buckets of 1 MiB"),
    )


def bucket_cap(steps: TimedSteps) -> float:
    """The size of a bucket in MiB that makes several useful ones, at most DDP's default."""
    return min(25.0, max(1.0, round(steps.bucket_bytes / SMALL_BUCKET / (2 * USEFUL_BUCKETS), 1)))


def late_start(exposure: Exposure) -> Finding | None:
    """The reduction begins when backward is nearly over, because one bucket has most of the gradients."""
    steps = exposure.steps
    if not 0 < steps.buckets <= 2 or steps.bucket_bytes < 2 * USEFUL_BUCKETS * SMALL_BUCKET:
        return None
    cap = bucket_cap(steps)
    after = max(USEFUL_BUCKETS, ceil(steps.bucket_bytes / SMALL_BUCKET / cap))
    return exposure.finding(
        "late start",
        f"{'one bucket has' if steps.buckets == 1 else 'two buckets have'} all {steps.bucket_bytes / 1e6:.0f} MB of "
        "gradients, so that the reduction starts when backward ends",
        exposure.share * (1 - 1 / after),
        Change((f"ddp.bucket_cap_mb = {cap}",)),
        "high" if exposure.share > 2 * LIMITING_SHARE else "medium",
        MeasuredFigure("buckets per step", steps.buckets, "count", float(after), "with the change"),
    )


def no_overlap(exposure: Exposure) -> Finding | None:
    """FSDP2's collectives inside the passes; on CPU, torch runs them synchronously."""
    steps = exposure.steps
    if exposure.axis.split("+")[0] != "shard":
        return None
    shard, fsdp = steps.config.layout.shard, steps.config.fsdp
    if steps.is_cpu:
        return exposure.finding(
            "no overlap",
            f"with layout.shard = {shard}, FSDP2 runs its collectives synchronously on CPU, and nothing overlaps",
            exposure.share * (1 - 1 / USEFUL_BUCKETS),
            Change(('layout.shard = "none"',), "DDP overlaps its buckets with backward, if a replica fits in memory"),
            "high",
        )
    settings = (
        ("fsdp.reshard_after_forward = false",)
        if shard == "parameters" and fsdp.reshard_after_forward is True
        else (f"fsdp.prefetch = {fsdp.prefetch + 1}",)
    )
    return exposure.finding(
        "no overlap",
        "the collectives of an FSDP unit take longer than the computation beside them",
        exposure.share / 2,
        Change(settings, "needs memory for more unsharded parameters"),
        "medium",
    )


def volume(exposure: Exposure) -> Finding | None:
    """Too many bytes for the computation of a step, although nothing is wrong with how they are moved."""
    if exposure.share < VOLUME_SHARE:
        return None
    steps = exposure.steps
    actions = {
        "replicate": "raise batch.global, so that a step computes more per byte, or halve the bytes with "
        "ddp.comm_hook = bf16_compress; both change the numbers",
        "tensor": "use fewer tensor-parallel ranks and more data-parallel ones, if the model fits",
        "context": "use the other context.method, or fewer context-parallel ranks",
        "expert": "use fewer expert-parallel ranks, if the experts fit",
    }
    axis = exposure.axis.split("+")[0]
    settings: tuple[str, ...] = ()
    if axis == "tensor":
        tensor = divisors(steps.layout.tensor)[-2]
        replicate = steps.config.layout.replicate * (steps.layout.tensor // tensor)
        settings = (f"layout.tensor = {tensor}", f"layout.replicate = {replicate}")
    elif axis == "context":
        settings = (f'context.method = "{"all-to-all" if steps.config.context.method == "ring" else "ring"}"',)
    action = actions.get(axis, "move fewer bytes per step on this axis")
    return exposure.finding(
        "volume",
        "a step computes too little for the bytes that it moves",
        exposure.share / 2,
        Change(settings, action),
        "medium",
        MeasuredFigure("bandwidth of the exposed part", exposure.bandwidth, "B/s"),
    )
