"""Divides the exposed communication of profiled steps among the axes of the layout, exactly.

On CPU the training thread waits: inside collectives, and in the phase `sync`. A wait belongs to the collective that is
completed when it ends. A wait at whose end no collective is completed belongs to messages between pipeline stages or
between neighbours on the context axis, which are not collectives. The rest of `sync`, in which DDP waits for its
buckets, belongs at every moment to the collective in flight that is completed first. On CUDA, communication is exposed
while a kernel of NCCL runs and no other kernel does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.span_reader import Interval, StepSpanRecord, read_rank_spans
from meshwright.base.records.untrusted_records import finite_number
from meshwright.errors import ConfigError
from meshwright.insight.diagnose.trace.intervals import Intervals
from meshwright.insight.trace.collective_slices import GROUP, TOLERANCE, CollectiveMatcher, CollectiveSlice
from meshwright.insight.trace.profile_files import ProfilePath, ProfileReader, find_profiles

POINT_TO_POINT = ("pipeline", "context")
"""Axes whose ranks exchange messages outside of collectives."""
MAX_KERNELS = 2_000_000


@dataclass(frozen=True)
class ExposedStep:
    """The exposed communication of one profiled step on one rank."""

    rank: int
    step: int
    seconds: dict[str, float]
    """axis -> seconds. On CPU they add up to the exposed communication of the step; on CUDA two axes may communicate at
    the same time
    """

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def exposed_by_axis(folder: RunFolder) -> list[ExposedStep]:
    """Returns the exposed communication of every profiled step of a run, by step and rank, without profiles that cannot
    be read.
    """
    steps: list[ExposedStep] = []
    for profile in find_profiles(folder):
        spans = [
            span
            for span in read_rank_spans(folder, profile.rank, [profile.steps])
            if isinstance(span, StepSpanRecord) and span.attempt == profile.attempt
        ]
        with suppress(ConfigError):
            steps += exposed_steps(profile, spans)
    return sorted(steps, key=lambda item: (item.step, item.rank))


def exposed_steps(profile: ProfilePath, spans: Sequence[StepSpanRecord]) -> list[ExposedStep]:
    """Returns the exposed communication of the steps of one profile."""
    reader = ProfileReader(profile)
    matcher = CollectiveMatcher(reader.head)
    kernels: list[Interval] = []
    on_device: list[tuple[float, float, str]] = []
    for event in reader.events():
        matcher.add(event)
        begin, duration = finite_number(event.get("ts")), finite_number(event.get("dur"))
        if event.get("cat") == "kernel" and begin is not None and duration is not None and len(kernels) < MAX_KERNELS:
            start, args = begin + reader.head.base, event.get("args")
            group = args.get(GROUP) if isinstance(args, dict) else None
            if isinstance(group, str):
                on_device.append((start, start + duration, reader.head.axis(group)))
            else:
                kernels.append((start, start + duration))
    if reader.head.place.device == "cuda":
        return [exposed_on_device(span, on_device, intervals(kernels)) for span in spans]
    slices = matcher.slices()
    return [exposed_on_host(span, slices) for span in spans]


def exposed_on_host(step: StepSpanRecord, slices: Iterable[CollectiveSlice]) -> ExposedStep:
    """Divides the waits and the `sync` phases of a step among the axes."""
    own = sorted((item for item in slices if item.step == step.step), key=lambda item: item.end)
    rest = next((axis for axis in POINT_TO_POINT if axis in step.place.coordinates), "control")
    syncs = intervals([(phase.begin, phase.end) for phase in step.phases if phase.name == "sync"])
    parts = [(completed_axis(begin, end, own), end - begin) for begin, end in step.waits]
    rest_of_sync = syncs - intervals(step.waits)
    for begin, end in zip(rest_of_sync.start.tolist(), rest_of_sync.end.tolist(), strict=True):
        parts += divide_interval(begin, end, own).items()
    seconds: dict[str, float] = {}
    for axis, microseconds in parts:
        seconds[axis or rest] = seconds.get(axis or rest, 0.0) + microseconds / 1e6
    return ExposedStep(step.place.rank, step.step, seconds)


def completed_axis(begin: float, end: float, slices: Sequence[CollectiveSlice]) -> str:
    """Returns the axis of the collective that was completed during a wait, or an empty string. Of several ones, the
    one that was called last counts: a thread waits for what it has just called, while older ones complete as well.
    The collectives are in the order of their completion.
    """
    first = bisect_left(slices, begin, key=lambda item: item.end)
    last = bisect_right(slices, end + TOLERANCE, key=lambda item: item.end)
    completed = [item for item in slices[first:last] if item.begin <= end]
    return max(completed, key=lambda item: item.begin).axis if completed else ""


def divide_interval(begin: float, end: float, slices: Iterable[CollectiveSlice]) -> dict[str, float]:
    """Divides an interval among the axes of the collectives in flight, of which the one that is completed first counts.
    The axis "" is the time without a collective.
    """
    inside = [item for item in slices if item.begin < end and item.end > begin]
    cuts = sorted({begin, end, *(min(max(t, begin), end) for item in inside for t in (item.begin, item.end))})
    parts: dict[str, float] = {}
    for left, right in pairwise(cuts):
        flying = [item for item in inside if item.begin <= left and item.end >= right]
        axis = min(flying, key=lambda item: item.end).axis if flying else ""
        parts[axis] = parts.get(axis, 0.0) + right - left
    return parts


def exposed_on_device(
    step: StepSpanRecord, communication: Iterable[tuple[float, float, str]], kernels: Intervals
) -> ExposedStep:
    """Returns how long kernels of NCCL ran while no other kernel did, by axis."""
    by_axis: dict[str, list[Interval]] = {}
    for begin, end, axis in communication:
        if step.begin <= begin < step.end:
            by_axis.setdefault(axis, []).append((begin, end))
    seconds = {axis: (intervals(covered) - kernels).total / 1e6 for axis, covered in by_axis.items()}
    return ExposedStep(step.place.rank, step.step, seconds)


def intervals(covered: Sequence[Interval]) -> Intervals:
    """Returns the time that intervals cover."""
    columns = np.array(covered, dtype=np.float64).reshape(-1, 2)
    return Intervals.union(columns[:, 0], columns[:, 1])
