"""Causes that the trace of a single rank shows: loader, collectives, under-used device, memory allocation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.insight.diagnose.finding import LIMITING_SHARE, Change, Confidence, Finding, MeasuredFigure
from meshwright.insight.diagnose.trace.activities import LOADER
from meshwright.insight.diagnose.trace.breakdown import ALLOCATION, SYNCHRONIZATION, Breakdown, RankTimeline
from meshwright.insight.diagnose.trace.kineto.event_table import Kind

SMALL_KERNEL = 10.0
"""Microseconds; a kernel that is shorter takes less time than the host needs to launch it."""
COMPILED = r"^(?:Torch-Compiled Region|CompiledFunction|triton_)"
"""Operators and kernels of code that torch.compile has compiled."""
CHECK = "meshwright diagnose TRACE"
"""on a trace of the changed program"""


def confidence(share: float) -> Confidence:
    """Evidence that takes a tenth of the time is not noise."""
    return "high" if share >= 0.1 else "medium"


def find_data(timeline: RankTimeline, breakdown: Breakdown) -> Iterator[Finding]:
    """The device idles while the host waits for the loader."""
    seconds = breakdown.idle_causes.get("loader", 0.0)
    share = breakdown.share(seconds)
    if share < LIMITING_SHARE:
        return
    trace = timeline.trace
    loader = trace.host(LOADER).clip(*timeline.window)
    single = bool(trace.events.named("_SingleProcessDataLoaderIter").any())
    processes = "its only process, the training process" if single else "its worker processes"
    steps = max(1, len(timeline.steps))
    action = (
        "DataLoader(num_workers=4, pin_memory=True, persistent_workers=True) prepares batches while the device computes"
        if single
        else "a larger num_workers or prefetch_factor of DataLoader, or cheaper decoding and faster storage"
    )
    idle = "The device is idle" if timeline.activities.on_device else "The rank computes nothing"
    yield Finding(
        "data",
        "loader",
        f"{idle} for {share:.0%} of the time while the host waits for the DataLoader, which decodes in {processes}.",
        share,
        confidence(share),
        phase="fetch",
        evidence=(
            MeasuredFigure(
                "time in the loader per step", loader.total / 1e6 / steps, "s", breakdown.seconds / steps, "step time"
            ),
            MeasuredFigure("of it without compute, per step", seconds / steps, "s"),
        ),
        change=Change(settings_for(trace.header, "data.workers = 4"), action),
        check=CHECK,
    )


def settings_for(header: dict[str, object], *settings: str) -> tuple[str, ...]:
    """Lines of a run file, for a trace that Meshwright recorded."""
    return settings if "meshwright" in header else ()


def find_memory(timeline: RankTimeline, breakdown: Breakdown) -> Iterator[Finding]:
    """The device idles while the host allocates or frees its memory."""
    seconds = breakdown.idle_causes.get("allocation", 0.0)
    share = breakdown.share(seconds)
    if share < LIMITING_SHARE:
        return
    events = timeline.trace.events
    low, high = timeline.window
    calls = events.named(ALLOCATION) & (events.start >= low) & (events.start < high)
    steps = max(1, len(timeline.steps))
    yield Finding(
        "memory",
        "allocation",
        f"The device is idle for {share:.0%} of the time while the host allocates and frees its memory during steps.",
        share,
        confidence(share),
        evidence=(
            MeasuredFigure("allocations and releases per step", float(calls.sum()) / steps, "count"),
            MeasuredFigure(
                "device idle meanwhile, per step", seconds / steps, "s", breakdown.seconds / steps, "step time"
            ),
        ),
        change=Change(
            action="leave more memory free: a smaller micro-batch or activation checkpointing, "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation, no torch.cuda.empty_cache()"
        ),
        check=CHECK,
    )


def find_device(timeline: RankTimeline, breakdown: Breakdown) -> Iterator[Finding]:
    """The device idles because the host launches too slowly or synchronizes, or its matrices have bad shapes."""
    if timeline.activities.on_device:
        yield from find_launch(timeline, breakdown)
        yield from find_synchronization(timeline, breakdown)
        yield from find_shapes(timeline, breakdown)
    else:
        yield from find_python(breakdown)


def find_launch(timeline: RankTimeline, breakdown: Breakdown) -> Iterator[Finding]:
    seconds = breakdown.idle_causes.get("launch", 0.0)
    share = breakdown.share(seconds)
    if share < LIMITING_SHARE:
        return
    activities = timeline.activities
    kernels = activities.end[activities.is_compute] - activities.start[activities.is_compute]
    steps = max(1, len(timeline.steps))
    small = float((kernels < SMALL_KERNEL).mean()) if len(kernels) else 0.0
    idle = timeline.idle["launch"]
    optimizer = (idle & timeline.trace.host(r"^Optimizer\.step")).total / max(idle.total, 1e-9)
    action = (
        "torch.compile or CUDA graphs launch fewer and larger kernels; a larger micro-batch makes each kernel longer"
    )
    if optimizer > 0.3:
        action = f"{optimizer:.0%} of it is in the optimizer: fused=True or foreach=True; " + action
    compiled = bool(timeline.trace.events.named(COMPILED).any())
    is_small = small > 0.5
    median = float(np.median(kernels)) / 1e6 if len(kernels) else 0.0
    yield Finding(
        "device",
        "small kernels" if is_small else "host-bound launch",
        f"The device is idle for {share:.0%} of the time because the host launches the next kernel too late"
        + (f"; {small:.0%} of the kernels take less than {SMALL_KERNEL:.0f} us." if is_small else "."),
        share,
        confidence(share),
        evidence=(
            MeasuredFigure("kernels per step", len(kernels) / steps, "count"),
            MeasuredFigure(
                "median kernel",
                median,
                "s",
                float(np.median(idle.end - idle.start)) / 1e6,
                "idle before a late one",
            ),
            MeasuredFigure(
                "device idle behind the host, per step", seconds / steps, "s", breakdown.seconds / steps, "step time"
            ),
        ),
        change=Change(settings_for(timeline.trace.header, *(() if compiled else ("compile.enabled = true",))), action),
        check=CHECK,
    )


def find_synchronization(timeline: RankTimeline, breakdown: Breakdown) -> Iterator[Finding]:
    seconds = breakdown.idle_causes.get("synchronization", 0.0)
    share = breakdown.share(seconds)
    if share < LIMITING_SHARE:
        return
    events = timeline.trace.events
    low, high = timeline.window
    waits = events.named(SYNCHRONIZATION) & ~events.is_device & (events.start >= low) & (events.start < high)
    # On ROCm, `.item()` copies with a call that waits, whose name does not say so: its operator does.
    calls = waits & (events.kind == Kind.RUNTIME) if (waits & (events.kind == Kind.RUNTIME)).any() else waits
    names = [events.names[name] for name in np.unique(events.name[calls])]
    steps = max(1, len(timeline.steps))
    yield Finding(
        "device",
        "synchronization",
        f"The device is idle for {share:.0%} of the time after the host waited for it in {', '.join(names)}.",
        share,
        confidence(share),
        evidence=(
            MeasuredFigure("synchronizing calls per step", float(calls.sum()) / steps, "count"),
            MeasuredFigure(
                "device idle after them, per step", seconds / steps, "s", breakdown.seconds / steps, "step time"
            ),
        ),
        change=Change(action="read losses and metrics (.item(), .cpu()) every few steps; copy with non_blocking=True"),
        check=CHECK,
    )


def find_shapes(timeline: RankTimeline, breakdown: Breakdown) -> Iterator[Finding]:
    """cuBLAS and CUTLASS kernels carry the alignment of their operands in their names."""
    events, activities = timeline.trace.events, timeline.activities
    slow = events.named(r"(?i)gemm.*align[12](?!\d)")[activities.rows] & activities.is_compute
    seconds = activities.intervals(slow).total / 1e6
    share = breakdown.share(seconds) / 2  # aligned operands double the rate at least
    if share < LIMITING_SHARE:
        return
    steps = max(1, len(timeline.steps))
    yield Finding(
        "device",
        "shapes",
        f"Matrix products with unaligned operands take {breakdown.share(seconds):.0%} of the time.",
        share,
        "medium",
        evidence=(
            MeasuredFigure(
                "time in unaligned matrix products, per step",
                seconds / steps,
                "s",
                breakdown.seconds / steps,
                "step time",
            ),
        ),
        change=Change(action="pad the vocabulary, hidden and batch sizes to multiples of 64"),
        check=CHECK,
    )


def find_python(breakdown: Breakdown) -> Iterator[Finding]:
    """On a host without a device, time outside operators is Python, or a library that the profiler does not see."""
    seconds = breakdown.idle_causes.get("outside operators", 0.0)
    share = breakdown.share(seconds)
    if share < LIMITING_SHARE:
        return
    yield Finding(
        "device",
        "host outside operators",
        f"The rank runs no operator and no collective for {share:.0%} of the time.",
        share,
        "low",
        evidence=(MeasuredFigure("time outside operators", seconds, "s", breakdown.seconds, "time of the trace"),),
        change=Change(action="with_stack=True shows what Python does there; larger batches or torch.compile reduce it"),
        check=CHECK,
    )
