"""The timeline of one step on every rank, from the spans in a run folder. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import format_seconds, open_regular_file
from meshwright.base.records.phases import STEP_PHASES
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.records.span_reader import Interval, RankPlace, StepSpanRecord, parse_place, parse_step
from meshwright.base.records.untrusted_records import parse_event
from meshwright.insight.report.document import Bar, BarChart, Section, Table
from meshwright.insight.report.pictures import PHASE_CLASSES, WIDTH, spread

TAIL_BYTES = 2 << 20
"""Bytes that are read of a file of spans, from its end."""
MAX_RANKS = 16
"""Ranks that are drawn."""
MAX_ENTRIES = 1000
"""Phases and waits of a step that are drawn."""
MICROSECONDS = 1e6
LEGEND = {"sync": "sync (exposed communication)", "wait": "wait for other ranks inside a phase"}


def timeline_section(history: RunHistory, attempt: int, near: float | None) -> Section | None:
    """Draws the step that all drawn ranks recorded and whose duration is closest to `near` seconds, the median.

    Returns None if the run has no spans.
    """
    ranks = spread(history.ranks, MAX_RANKS)
    spans = {rank: read_newest_steps(history.folder, rank, attempt) for rank in ranks}
    spans = {rank: steps for rank, steps in spans.items() if steps}
    shared = set.intersection(*(set(steps) for steps in spans.values())) if 0 in spans else set()
    if not shared:
        return None
    step = min(shared, key=lambda each: (abs(duration(spans[0][each]) - (near or 0.0)), -each))
    return draw_step(step, {rank: steps[step] for rank, steps in spans.items()}, len(history.ranks))


def read_newest_steps(folder: RunFolder, rank: int, attempt: int) -> dict[int, StepSpanRecord]:
    """The steps of an attempt in the last TAIL_BYTES of an untrusted file, by number."""
    try:
        with open_regular_file(folder.spans(rank)) as file:
            size = os.fstat(file.fileno()).st_size
            first = file.readline(1 << 16)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).split(b"\n")[(1 if size > TAIL_BYTES else 0) : -1]
    except OSError:
        return {}
    place, steps = RankPlace(rank), dict[int, StepSpanRecord]()
    for event in map(parse_event, [first, *lines]):
        if event is not None and event.get("kind") == "rank":
            place = parse_place(event, rank)
        elif event is not None and event.get("kind") == "step" and event.get("attempt") == attempt:
            record = parse_step(event, place)
            if record is not None and len(record.phases) + len(record.waits) <= MAX_ENTRIES:
                steps[record.step] = record
    return steps


def draw_step(step: int, rows: Mapping[int, StepSpanRecord], ranks: int) -> Section:
    first, last = min(row.begin for row in rows.values()), max(row.end for row in rows.values())
    scale = WIDTH / (last - first) if last > first else 0.0
    bars, table, used = [], [], set[str]()
    for rank, row in rows.items():
        entries = list(timeline_entries(row))
        used |= {name for name, *_ in entries}
        segments = [
            (PHASE_CLASSES[name], (begin - first) * scale, (end - begin) * scale, f"rank {rank}, {label}")
            for name, begin, end, label in entries
        ]
        bars.append(Bar(f"rank {rank}", segments, format_seconds(duration(row))))
        waited = sum(end - begin for name, begin, end, _ in entries if name in LEGEND)
        times = (row.begin - first, row.end - first, waited)
        table.append([f"rank {rank}", *(format_seconds(time / MICROSECONDS) for time in times)])
    order = [name for name in (*STEP_PHASES, "wait") if name in used]
    chart = BarChart("", bars, [(PHASE_CLASSES[name], LEGEND.get(name, name)) for name in order])
    drawn = f"; {len(rows)} of {ranks:,} ranks are drawn" if len(rows) < ranks else ""
    span = format_seconds((last - first) / MICROSECONDS)
    return Section(
        "Timeline of a step",
        [f"Step {step:,} from its begin on the first rank, in {span}{drawn}."],
        tables=[Table(("", "begin", "end", "waits for other ranks"), table)],
        bars=[chart],
        notes=["Times are those of the clock of rank 0. meshwright trace RUN writes all steps for Perfetto."],
    )


def timeline_entries(row: StepSpanRecord) -> Iterator[tuple[str, float, float, str]]:
    """Yields (name, begin, end, label) of the phases, then of the waits in phases other than `sync`."""
    for phase in row.phases:
        where = f", stage {phase.action[0]}, micro-batch {phase.action[1]}" if phase.action is not None else ""
        spent = format_seconds((phase.end - phase.begin) / MICROSECONDS)
        yield phase.name, phase.begin, phase.end, f"{phase.name}{where}: {spent}"
    synced = [(phase.begin, phase.end) for phase in row.phases if phase.name == "sync"]
    for wait in row.waits:
        if not any(begin <= middle(wait) <= end for begin, end in synced):
            yield "wait", *wait, f"wait: {format_seconds((wait[1] - wait[0]) / MICROSECONDS)}"


def middle(interval: Interval) -> float:
    return (interval[0] + interval[1]) / 2


def duration(row: StepSpanRecord) -> float:
    """The seconds of a step."""
    return (row.end - row.begin) / MICROSECONDS
