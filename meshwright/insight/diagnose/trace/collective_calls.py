"""The collectives of one rank: kind, message size, process group, and the part of their time that is exposed."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.insight.diagnose.trace.breakdown import RankTimeline
from meshwright.insight.diagnose.trace.intervals import Intervals
from meshwright.insight.diagnose.trace.kineto.collective_args import CollectiveArgs, collective_args
from meshwright.insight.diagnose.trace.kineto.event_table import EventTable, Floats, Kind, Mask

COLLECTIVES = {
    "all-reduce": r"all_?reduce|cross_device_reduce",
    "reduce-scatter": r"reduce_?scatter",
    "all-gather": r"all_?gather|allgather",
    "all-to-all": r"all_?to_?all|alltoall|dispatch|combine",
    "send/recv": r"send|recv|coalesced|p2p",
    "broadcast": r"broadcast|bcast",
    "barrier": r"barrier",
    "reduce": r"reduce",
}
"""Kind of a collective -> pattern in the name of a kernel, an annotation or its metadata; the first match counts."""
UNKNOWN = "collective"
NO_ARGS = CollectiveArgs()
MAX_CALLS = 50_000
"""Collectives of a rank that are compared with those of other ranks: the first ones."""
MAX_AXIS = 32
"""Characters of the name of an axis."""


@dataclass(frozen=True)
class CollectiveCalls:
    """The collectives of a rank in the order of their starts. Times are in microseconds."""

    kind: list[str]
    group: list[str]
    """name of the process group, or an empty string"""
    axis: list[str]
    """description of the process group, or an empty string"""
    sequence: list[int]
    message_bytes: Floats
    """zero if it is not known"""
    largest_split: Floats
    """the largest part that an all-to-all sends to one rank, as a multiple of an equal part; zero if it is not known"""
    start: Floats
    end: Floats
    exposed: Floats
    """time of each collective during which the rank does not compute"""

    def __len__(self) -> int:
        return len(self.start)

    def of_kind(self, *kinds: str) -> Mask:
        return np.fromiter((kind in kinds for kind in self.kind), bool, len(self))

    @property
    def duration(self) -> Floats:
        return self.end - self.start


def collective_calls(timeline: RankTimeline) -> CollectiveCalls:
    """Lists the collectives of a rank. A kernel without metadata has that of the annotation that launched it."""
    events, activities = timeline.trace.events, timeline.activities
    chosen = np.flatnonzero(activities.is_communication)[:MAX_CALLS]
    rows, start, end = activities.rows[chosen], activities.start[chosen], activities.end[chosen]
    launch = activities.launch[chosen]
    annotation = launched_in(events, launch, r"^(?:nccl|rccl|mscclpp):") if activities.on_device else rows
    operator = launched_in(events, launch, r"^record_param_comms") if activities.on_device else rows
    kinds = [collective_kind(name) for name in events.names]
    args = [known_args(events, *sources) for sources in zip(rows, operator, annotation, strict=True)]
    kind = [
        collective_kind(known.collective) if known.collective
        else kinds[events.name[by]] if by >= 0 and kinds[events.name[by]] != UNKNOWN
        else kinds[events.name[row]]
        for row, by, known in zip(rows, annotation, args, strict=True)
    ]  # fmt: skip
    if not activities.on_device:
        args = with_recorded(args, kind, timeline.trace.header)
    axes = group_axes(timeline.trace.header)
    overlapped = Intervals(start, end).overlap_with(timeline.compute)
    splits = [
        max(known.splits) * len(known.splits) / sum(known.splits) if sum(known.splits) > 0 else 0.0 for known in args
    ]
    return CollectiveCalls(
        kind,
        [known.group for known in args],
        [axes.get(known.group) or described_axis(known) for known in args],
        [known.sequence for known in args],
        np.array([known.message_bytes for known in args], np.float64),
        np.array(splits, np.float64),
        start,
        end,
        (end - start) - overlapped,
    )


def launched_in(events: EventTable, launch: Floats, pattern: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The row of the operator or annotation, of those that match, in which each kernel was launched, or -1."""
    rows = np.flatnonzero(events.named(pattern) & (events.kind >= Kind.ANNOTATION))
    if not len(rows):
        return np.full(len(launch), -1)
    rows = rows[np.argsort(events.start[rows], kind="stable")]
    position = np.searchsorted(events.start[rows], launch, side="right") - 1
    found = rows[np.maximum(position, 0)]
    return np.where((position >= 0) & (launch < events.end[found]), found, -1)


def known_args(events: EventTable, *rows: int) -> CollectiveArgs:
    """The arguments of the first row that names its collective, else of the first that has a message size."""
    found = [args for row in rows if (args := events.collectives.get(int(row))) is not None]
    return next(
        (args for args in found if args.collective), next((args for args in found if args.message_bytes), NO_ARGS)
    )


def collective_kind(name: str) -> str:
    """The kind of collective that a name describes."""
    text = name.lower()
    return next((kind for kind, pattern in COLLECTIVES.items() if re.search(pattern, text)), UNKNOWN)


def described_axis(args: CollectiveArgs) -> str:
    """What the program calls a process group: `mesh_shard` is the mesh dimension shard."""
    return "" if args.description in ("", "undefined", "default_pg") else args.description.removeprefix("mesh_")


def meshwright_metadata(header: dict[str, Any]) -> dict[str, Any]:
    """What a profiled run of Meshwright adds to its traces; an empty dict for other programs."""
    metadata = header.get("meshwright")
    return metadata if isinstance(metadata, dict) else {}


def group_axes(header: dict[str, Any]) -> dict[str, str]:
    """Process group -> axis of the layout, of a run of Meshwright."""
    axes = meshwright_metadata(header).get("axes")
    axes = axes if isinstance(axes, dict) else {}
    return {group: axis[:MAX_AXIS] for group, axis in axes.items() if isinstance(axis, str)}


def with_recorded(args: list[CollectiveArgs], kinds: list[str], header: dict[str, Any]) -> list[CollectiveArgs]:
    """Adds what a run of Meshwright recorded about its collectives, in order: annotations of Gloo name no group."""
    rows = meshwright_metadata(header).get("collectives")
    waiting: dict[str, deque[CollectiveArgs]] = defaultdict(deque)
    for row in rows if isinstance(rows, list) else []:
        if isinstance(row, list) and len(row) == 6:
            _, group, sequence, collective, _, elements = row
            fields = {
                "Process Group Name": group,
                "Seq": sequence,
                "Collective name": collective,
                "In msg nelems": elements,
            }
            recorded = collective_args(fields)
            waiting[collective_kind(recorded.collective)].append(recorded)
    return [waiting[kind].popleft() if waiting[kind] else known for known, kind in zip(args, kinds, strict=True)]
