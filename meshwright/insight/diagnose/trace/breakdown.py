"""Where the time of a rank goes: compute, communication, overlap, memory copies, and idle time by its cause."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from meshwright.insight.diagnose.trace.activities import LOADER, Activities, measured_activities
from meshwright.insight.diagnose.trace.intervals import Intervals
from meshwright.insight.diagnose.trace.kineto.kineto_trace import KinetoTrace

ALLOCATION = (
    r"^(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostFree|Host(?:Malloc|Register))|^cuMem(?:Create|Map|Unmap|Alloc|Free)"
)
SYNCHRONIZATION = r"^(?:cuda|cu|hip)(?:Stream|Device|Event|Ctx)Synchronize|^aten::(?:item|_local_scalar_dense)"
ALLOCATION_SHARE = 0.25
"""Share of an idle interval in allocations above which they are its cause."""
MAX_BURST_GAP = 2000.0
"""Microseconds between two collectives that may belong to one burst."""

IDLE_CAUSES = {
    "loader": "the host waits for samples",
    "allocation": "the host allocates or frees memory of the device",
    "collective issue": "the host issues collectives one after the other, and little is computed between them",
    "synchronization": "the host has waited for the device, and launches anew",
    "launch": "the host launches the next activity too late",
    "dependency": "the next activity is launched, and waits for another one",
    "unknown launch": "it is not recorded when the host launched the next activity",
    "outside operators": "the host runs no operator, in a trace without a device",
}
"""Why a device is idle; every idle interval has the first cause that fits."""


@dataclass(frozen=True)
class Breakdown:
    """The time of one rank over the measured steps, or over one step, in seconds.

    `seconds` = `compute` + `exposed` + `memory` + `idle`. Definitions are those of HolisticTraceAnalysis: overlapping
    intervals are merged, and time lasts from the start of the first activity to the end of the last.
    """

    seconds: float
    compute: float
    communication: float
    """all communication, overlapped or not"""
    overlapped: float
    """communication during which the rank computes"""
    exposed: float
    """communication during which the rank does not compute"""
    memory: float
    """copies and fills during which there is neither compute nor communication"""
    idle: float
    idle_causes: dict[str, float] = field(default_factory=dict)
    """cause of IDLE_CAUSES -> seconds; they add up to `idle`"""

    def share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds > 0 else 0.0

    @property
    def overlap(self) -> float:
        """The fraction of communication that is overlapped by compute."""
        return self.overlapped / self.communication if self.communication > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class RankTimeline:
    """The intervals of one rank from which breakdowns and findings are computed."""

    trace: KinetoTrace
    activities: Activities
    compute: Intervals
    communication: Intervals
    memory: Intervals
    busy: Intervals
    idle: dict[str, Intervals]
    steps: dict[int, tuple[float, float]]
    """number of a step -> the times between which its activities run"""

    @property
    def window(self) -> tuple[float, float]:
        return (float(self.busy.start[0]), float(self.busy.end[-1])) if len(self.busy) else (0.0, 0.0)

    def breakdown(self, low: float, high: float) -> Breakdown:
        """The breakdown of the time between two times."""
        compute, communication, memory, busy = (
            intervals.clip(low, high) for intervals in (self.compute, self.communication, self.memory, self.busy)
        )
        exposed = communication - compute
        return Breakdown(
            seconds=(high - low) / 1e6,
            compute=compute.total / 1e6,
            communication=communication.total / 1e6,
            overlapped=(communication.total - exposed.total) / 1e6,
            exposed=exposed.total / 1e6,
            memory=(memory - (compute | communication)).total / 1e6,
            idle=(high - low - busy.total) / 1e6,
            idle_causes={cause: intervals.clip(low, high).total / 1e6 for cause, intervals in self.idle.items()},
        )


def make_timeline(trace: KinetoTrace) -> RankTimeline:
    """Divides the time of a rank."""
    activities = measured_activities(trace)
    everything = np.ones(len(activities.rows), bool)
    busy = activities.intervals(everything)
    communication = activities.intervals(activities.is_communication)
    compute = activities.intervals(activities.is_compute)
    return RankTimeline(
        trace,
        activities,
        compute,
        communication,
        activities.intervals(activities.is_memory),
        busy,
        idle_by_cause(trace, activities, busy, compute, communication),
        step_windows(trace, activities),
    )


def idle_by_cause(
    trace: KinetoTrace, activities: Activities, busy: Intervals, compute: Intervals, communication: Intervals
) -> dict[str, Intervals]:
    """Divides the idle time of a rank by its cause."""
    if not len(busy):
        return {}
    remaining = busy.gaps(float(busy.start[0]), float(busy.end[-1]))
    causes: dict[str, Intervals] = {}
    causes["loader"] = remaining & trace.host(LOADER)
    remaining = remaining - causes["loader"]
    # The host allocates for several kernels in a row and is late with all of them.
    allocated = remaining.overlap_with(trace.host(ALLOCATION)) > ALLOCATION_SHARE * (remaining.end - remaining.start)
    causes["allocation"], remaining = remaining.select(allocated), remaining.select(~allocated)
    causes["collective issue"] = remaining & collective_bursts(communication, compute)
    remaining = remaining - causes["collective issue"]
    if not activities.on_device:
        return causes | {"outside operators": remaining}
    # The activity that ends an idle interval tells whether the host was late.
    following = np.minimum(np.searchsorted(activities.start, remaining.end), len(activities.rows) - 1)
    unknown = np.isnan(activities.launch[following])
    if unknown.any():
        causes["unknown launch"], remaining = remaining.select(unknown), remaining.select(~unknown)
        following = following[~unknown]
    is_late = activities.launch[following] > remaining.start
    after_wait = is_late & trace.host(SYNCHRONIZATION).contains(remaining.start)
    causes["synchronization"] = remaining.select(after_wait)
    causes["launch"] = remaining.select(is_late & ~after_wait)
    causes["dependency"] = remaining.select(~is_late)
    return causes


def collective_bursts(communication: Intervals, compute: Intervals) -> Intervals:
    """The times between collectives that follow one another shortly, with more idle time than compute between them."""
    between = Intervals(communication.end[:-1], communication.start[1:])
    length = between.end - between.start
    return between.select((length < MAX_BURST_GAP) & (between.overlap_with(compute) < length / 2))


def step_windows(trace: KinetoTrace, activities: Activities) -> dict[int, tuple[float, float]]:
    """The times of each measured step: from its first activity to the first of the following step.

    An activity belongs to the step during which the host launched it. The last step is left out if there are several.
    """
    numbers, steps = trace.steps()
    if not len(steps) or not len(activities.rows):
        return {}
    step = np.searchsorted(steps.start, activities.step_time, side="right") - 1
    found, first = np.unique(step, return_index=True)  # activities are in the order of their starts
    first = first[found >= 0]
    bounds = [*activities.start[first].tolist(), float(activities.end.max())]
    pairs = zip(numbers[found[found >= 0]].tolist(), bounds, bounds[1:], strict=False)
    return {number: (start, stop) for number, start, stop in pairs if stop > start}
