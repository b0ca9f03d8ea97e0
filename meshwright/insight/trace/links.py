"""Links between ranks in one step: who waited for whom, from the spans of the step alone.

The passes of a pipeline are linked by stage and micro-batch. Every rank takes part in the last `sync` of a step, which
is linked in all layouts. Where all ranks are in one process group, their waits correspond one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import dropwhile, takewhile

from meshwright.base.records.span_reader import Interval, PhaseSpan, StepSpanRecord

LINKED_MICROSECONDS = 100.0
"""A rank that arrived less than this before the last one did not wait for it."""


@dataclass(frozen=True)
class Arrival:
    """A rank in a collective: from when it arrives to when it leaves."""

    rank: int
    begin: float
    end: float


@dataclass(frozen=True)
class WaitLink:
    """A rank that waited, and the rank and time that it waited for."""

    track: str
    source: int
    source_time: float
    target: int
    target_time: float


def last_rank(arrivals: Iterable[Arrival]) -> int:
    """Returns the rank that arrived last, for which the others waited."""
    return max(arrivals, key=lambda arrival: arrival.begin).rank


def link_arrivals(arrivals: Sequence[Arrival], track: str) -> list[WaitLink]:
    """Links every rank that waited in a collective with the rank that arrived last."""
    last = max(arrivals, key=lambda arrival: arrival.begin)
    return [
        WaitLink(track, last.rank, last.begin, arrival.rank, last.begin)
        for arrival in arrivals
        if last.begin - arrival.begin >= LINKED_MICROSECONDS and last.begin <= arrival.end
    ]


def matching_waits(steps: Sequence[StepSpanRecord]) -> list[list[Arrival]]:
    """Returns the waits of one step that belong together, by rank; none where they cannot be told apart."""
    if len(steps) < 2 or len(steps) < steps[0].place.ranks:
        return []
    axes = {axis for step in steps for axis in step.place.coordinates}
    same_count = len({len(step.waits) for step in steps}) == 1
    if len(axes) != 1 or "pipeline" in axes or not same_count:
        return []
    return [
        [Arrival(step.place.rank, *wait) for step, wait in zip(steps, waits, strict=True)]
        for waits in zip(*(step.waits for step in steps), strict=True)
    ]


def last_sync(step: StepSpanRecord) -> Interval | None:
    """Returns the wait before the update: for the gradients, and for the sum of the loss over all ranks."""
    before = dropwhile(lambda phase: phase.name != "sync", reversed(step.phases))
    syncs = list(takewhile(lambda phase: phase.name == "sync", before))
    return (syncs[-1].begin, syncs[0].end) if syncs else None


def matching_syncs(steps: Sequence[StepSpanRecord]) -> list[Arrival]:
    """Returns the last `sync` phase of every rank, or nothing if a rank is missing."""
    arrivals = [Arrival(step.place.rank, *sync) for step in steps if (sync := last_sync(step)) is not None]
    return arrivals if len(arrivals) > 1 and len(arrivals) >= steps[0].place.ranks else []


def link_passes(steps: Sequence[StepSpanRecord]) -> list[WaitLink]:
    """Links the passes of a pipeline: a forward pass of a stage needs that of the stage before it, a backward pass that
    of the stage after it.
    """
    links = []
    for steps_of_pipeline in pipelines(steps):
        passes = first_passes(steps_of_pipeline)
        for (name, stage, micro_batch), (rank, receiver) in passes.items():
            neighbour = stage - 1 if name == "forward" else stage + 1
            sender = passes.get((name, neighbour, micro_batch))
            if sender is not None and sender[0] != rank and sender[1].end <= receiver.begin:
                sent = max(sender[1].begin, sender[1].end - 1.0)  # inside of the pass, or the arrow has no begin
                links.append(WaitLink("pipeline", sender[0], sent, rank, receiver.begin))
    return links


def pipelines(steps: Sequence[StepSpanRecord]) -> list[list[StepSpanRecord]]:
    """Returns the steps of the ranks of each pipeline: they differ in their pipeline coordinate only."""
    found: dict[tuple[tuple[str, int], ...], list[StepSpanRecord]] = {}
    for step in steps:
        key = tuple(item for item in step.place.coordinates.items() if item[0] != "pipeline")
        found.setdefault(key, []).append(step)
    return list(found.values())


def first_passes(steps: Sequence[StepSpanRecord]) -> dict[tuple[str, int, int], tuple[int, PhaseSpan]]:
    """Returns (forward or backward, stage, micro-batch) -> rank and pass. A backward pass that is divided in two sends
    its gradient after the first part.
    """
    passes: dict[tuple[str, int, int], tuple[int, PhaseSpan]] = {}
    for step in steps:
        for phase in step.phases:
            if phase.action is not None:
                passes.setdefault((phase.name, *phase.action), (step.place.rank, phase))
    return passes
