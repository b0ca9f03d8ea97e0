"""Merges the spans and profiles of all ranks into one trace, line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Any

from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.span_reader import OtherSpan, Span, StepSpanRecord, newest_step, read_spans, span_ranks
from meshwright.base.records.untrusted_records import finite_number
from meshwright.errors import ConfigError
from meshwright.insight.trace.collective_slices import CollectiveMatcher, CollectiveSlice
from meshwright.insight.trace.links import (
    Arrival,
    last_rank,
    last_sync,
    link_arrivals,
    link_passes,
    matching_syncs,
    matching_waits,
)
from meshwright.insight.trace.profile_files import ProfilePath, ProfileReader, find_profiles
from meshwright.insight.trace.trace_events import FIRST_LANE, FIRST_THREAD, TRACK_IDS, EventWriter

DEFAULT_STEPS = 100
"""Newest steps that are merged by default, besides the profiled ones."""
NEIGHBOURS = 2
"""Steps before and after profiled ones that are merged with them."""
MAX_PROFILE_EVENTS = 2_000_000
"""Events that are copied from one profile."""
MAX_NAME = 512
MAX_LANES = FIRST_THREAD - FIRST_LANE


class MergedTrace:
    """One trace of a run. `lines` writes it; afterwards the other attributes say what it contains."""

    def __init__(self, folder: RunFolder, steps: range | None = None) -> None:
        self.folder = folder
        self.ranks = span_ranks(folder)
        if not self.ranks:
            raise ConfigError(f"{folder.root} has no spans", "expected the folder of a run that has completed a step")
        found = find_profiles(folder)
        self.selected = [steps] if steps is not None else default_steps(folder, found)
        self.profiles = [item for item in found if any(overlaps(item.steps, steps) for steps in self.selected)]
        self.steps: set[int] = set()
        self.notes: list[str] = []
        self.collectives: list[CollectiveSlice] = []
        """those of the profiled steps, on all ranks"""
        self.writer = EventWriter(0.0)

    def lines(self) -> Iterator[str]:
        """Yields the text of the trace."""
        groups = (
            spans
            for group in read_spans(self.folder, self.selected)
            if (spans := [s for s in group if self.selects(s)])
        )
        first = next(groups, None)
        if first is None:
            raise ConfigError(f"{self.folder.root} has no spans of these steps", "try other --steps, or none")
        self.writer = EventWriter(float(int(min(span.begin for span in first))) - 1e6)
        other = {"run": self.folder.root.name, "base_unix_microseconds": self.writer.base, "clock": "rank 0"}
        label = {"ph": "M", "name": "process_labels", "pid": first[0].place.rank, "tid": 0, "args": {"labels": "rank"}}
        head = {"displayTimeUnit": "ms", "otherData": other}
        yield f'{json.dumps(head)[:-1]}, "traceEvents": [\n{json.dumps(label)}'
        for spans in chain([first], groups):
            yield from self.merge_spans(spans)
        for _, profiles in groupby(self.profiles, key=lambda profile: profile.steps):
            yield from self.merge_profiles(list(profiles))
        yield "\n]}\n"

    def selects(self, span: Span) -> bool:
        """Whether a span is merged: that of a step, or one directly before or after one."""
        after = 0 if isinstance(span, StepSpanRecord) else 1
        return any(steps.start <= span.step < steps.stop + after for steps in self.selected)

    def merge_spans(self, spans: Sequence[Span]) -> Iterator[str]:
        """Yields the slices of one step on all ranks, and the arrows between them."""
        steps = list({span.place.rank: span for span in spans if isinstance(span, StepSpanRecord)}.values())
        waits = matching_waits(steps)
        syncs = matching_syncs(steps)
        for span in spans:
            yield self.writer.process_name(span.place.rank, span.place.name)
            if isinstance(span, OtherSpan):
                track = "checkpoints" if span.name == "checkpoint" else "outside"
                yield self.writer.slice(span.place.rank, track, span.name, span.begin, span.end, step=span.step)
        for step in steps:
            self.steps.add(step.step)
            yield from self.step_slices(step, syncs, waits)
        links = [*link_passes(steps), *(link for arrivals in waits for link in link_arrivals(arrivals, "waits"))]
        for link in links + (link_arrivals(syncs, "steps") if syncs else []):
            source = (link.source, TRACK_IDS[link.track], link.source_time)
            yield self.writer.arrow("waited for", source, (link.target, TRACK_IDS[link.track], link.target_time))

    def step_slices(
        self, step: StepSpanRecord, syncs: Sequence[Arrival], waits: Sequence[Sequence[Arrival]]
    ) -> Iterator[str]:
        """Yields the slices of one step on one rank."""
        rank, numbered, write = step.place.rank, {"step": step.step}, self.writer.slice
        yield write(rank, "steps", f"step {step.step}", step.begin, step.end, attempt=step.attempt)
        last = {"last rank": last_rank(syncs)} if syncs else {}
        sync = last_sync(step)
        for phase in step.phases:
            is_last = phase.name == "sync" and sync is not None and phase.begin >= sync[0]
            yield write(rank, "steps", phase.name, phase.begin, phase.end, **numbered | (last if is_last else {}))
        for phase in step.phases:
            if phase.action is not None:
                stage, micro_batch = phase.action
                args = numbered | {"stage": stage, "micro-batch": micro_batch}
                yield write(rank, "pipeline", f"{phase.name} {micro_batch}", phase.begin, phase.end, **args)
        for index, (begin, end) in enumerate(step.waits):
            named = {"last rank": last_rank(waits[index])} if waits else {}
            yield write(rank, "waits", "wait", begin, end, **numbered | named)

    def merge_profiles(self, profiles: Sequence[ProfilePath]) -> Iterator[str]:
        """Yields the events of the profiles of a range of steps, and their collectives, linked across ranks."""
        slices: list[CollectiveSlice] = []
        for profile in profiles:
            try:
                reader = ProfileReader(profile)
            except ConfigError as error:
                self.notes.append(f"{error.message}: it is left out")
                continue
            yield self.writer.process_name(profile.rank, reader.head.place.name)
            matcher = CollectiveMatcher(reader.head)
            yield from self.profile_events(reader, matcher)
            slices += matcher.slices()
            self.notes += [f"{profile.path.name}: {note}" for note in reader.notes]
        yield from self.merge_collectives(slices)
        self.collectives += slices

    def profile_events(self, reader: ProfileReader, matcher: CollectiveMatcher) -> Iterator[str]:
        """Yields the events of one profile as events of the rank."""
        threads: dict[tuple[Any, Any], int] = {}
        names: dict[tuple[Any, Any], str] = {}
        rank, start, shift = reader.profile.rank, reader.profile.start, reader.head.base - self.writer.base
        for count, event in enumerate(reader.events()):
            if count >= MAX_PROFILE_EVENTS:
                reader.notes.append(f"only its first {MAX_PROFILE_EVENTS:,} events are merged")
                break
            kind, time = event.get("ph"), finite_number(event.get("ts"))
            place = (repr(event.get("pid"))[:64], repr(event.get("tid"))[:64])
            name = str(event.get("name", ""))[:MAX_NAME]
            if kind == "M" and name == "thread_name" and isinstance(event.get("args"), dict):
                names.setdefault(place, str(event["args"].get("name", ""))[:MAX_NAME].strip())
            if kind not in ("X", "s", "f") or time is None or not isinstance(event.get("pid"), int):
                continue
            thread = threads.setdefault(place, FIRST_THREAD + len(threads))
            copied = {"ph": kind, "pid": rank, "tid": thread, "ts": round(time + shift, 3), "name": name}
            if kind == "X":
                matcher.add(event)
                copied["dur"] = max(0.0, finite_number(event.get("dur")) or 0.0)
            else:
                copied["id"] = f"{rank}.{start}.{event.get('id')}"[:64]
            copied |= {key: event[key] for key in ("cat", "args", "bp") if key in event}
            yield self.writer.line(copied)
        for place, thread in threads.items():
            yield self.writer.thread_name(rank, thread, names.get(place, " ".join(place)))

    def merge_collectives(self, slices: Sequence[CollectiveSlice]) -> Iterator[str]:
        """Yields the collectives of all ranks, those of the same call linked."""
        calls: dict[tuple[Any, ...], list[CollectiveSlice]] = {}
        for item in slices:
            calls.setdefault(item.call, []).append(item)
        lanes: dict[CollectiveSlice, int] = {}
        for rank in sorted({item.rank for item in slices}):
            lanes |= place_in_lanes([item for item in slices if item.rank == rank])
        for item in sorted(slices, key=lambda item: (item.rank, item.begin)):
            args = {"axis": item.axis, "group": item.group, "sequence": item.sequence, "elements": item.elements}
            call = arrivals(calls[item.call])
            args |= {"step": item.step} | ({"last rank": last_rank(call)} if len(call) > 1 else {})
            yield self.writer.thread_slice(
                item.rank, lanes[item], f"collectives: {item.axis}", item.collective, item.begin, item.end, **args
            )
        for call_slices in calls.values():
            by_rank = {item.rank: lanes[item] for item in call_slices}
            for link in link_arrivals(arrivals(call_slices), "collectives") if len(call_slices) > 1 else ():
                source, target = by_rank[link.source], by_rank[link.target]
                yield self.writer.arrow(
                    "waited for", (link.source, source, link.source_time), (link.target, target, link.target_time)
                )


def arrivals(slices: Sequence[CollectiveSlice]) -> list[Arrival]:
    return [Arrival(item.rank, item.begin, item.end) for item in slices]


def place_in_lanes(slices: Sequence[CollectiveSlice]) -> dict[CollectiveSlice, int]:
    """Gives every collective of a rank a track of its axis on which no other one overlaps with it."""
    ends: list[tuple[str, float]] = []
    lanes: dict[CollectiveSlice, int] = {}
    for item in sorted(slices, key=lambda item: item.begin):
        free = (lane for lane, (axis, end) in enumerate(ends) if axis == item.axis and end <= item.begin)
        lane = next(free, len(ends))
        if lane == len(ends):
            if len(ends) == MAX_LANES:
                lane -= 1
            else:
                ends.append((item.axis, 0.0))
        ends[lane] = (item.axis, item.end)
        lanes[item] = FIRST_LANE + lane
    return lanes


def overlaps(first: range, second: range) -> bool:
    return first.start < second.stop and second.start < first.stop


def default_steps(folder: RunFolder, profiles: Sequence[ProfilePath]) -> list[range]:
    """The newest steps, and the profiled ones with their neighbours."""
    newest = newest_step(folder, span_ranks(folder)[0])
    around = [range(max(0, item.start - NEIGHBOURS), item.stop + NEIGHBOURS) for item in profiles]
    return [range(max(0, newest + 1 - DEFAULT_STEPS), newest + 1), *dict.fromkeys(around)]
