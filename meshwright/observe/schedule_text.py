"""A pipeline schedule on the terminal: one row a rank, one cell a slot; and the kinds beside each other. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.errors import ConfigError
from meshwright.topology.schedule_timeline import ActionCosts, Timeline, TimelineSlot, bubble_formula
from meshwright.topology.schedules import SCHEDULES

COLOURS = {"F": "white on blue", "B": "black on dark_orange", "I": "black on yellow", "W": "black on green"}
LATER = {"F": "black on sky_blue2", "B": "black on light_salmon1", "I": "black on khaki1", "W": "black on pale_green1"}
"""Of a rank's second, fourth, ... stage."""
MEANINGS = {"F": "forward", "B": "backward", "I": "backward, input's gradient", "W": "backward, weights' gradient"}
MAX_LINES = 200
"""Of a picture; what is longer is cut, and said to be."""


MAX_SLOTS = 16
"""Of one action, in a picture."""


def integer_costs(forward: int, backward_input: int, weight: int) -> ActionCosts:
    """Costs that can be drawn."""
    costs = ActionCosts(forward, backward_input, weight)
    for name, slots in vars(costs).items():
        if slots > MAX_SLOTS:
            raise ConfigError(f"{name} takes {slots} slots", f"allowed: 1 to {MAX_SLOTS}")
    return costs


def describe(timeline: Timeline, costs: ActionCosts) -> list[str]:
    """What the picture shows, in numbers."""
    size = f"{timeline.ranks} ranks x {timeline.makespan} slots"
    exact = bubble_formula(timeline.schedule, timeline.ranks, timeline.micro_batches, timeline.stages_per_rank, costs)
    known = f"; formula {exact[0]} = {exact[1]}" if exact else "; no closed form here"
    peaks = " ".join(map(str, ends_of(timeline.rank_peaks)))
    whole = " ".join(map(decimal, ends_of(timeline.normalized_peaks)))
    share = (
        f" of 1/{timeline.stages_per_rank} of a rank's layers = {whole} of all of them"
        if timeline.stages_per_rank > 1
        else ""
    )
    return [
        f"bubble {float(timeline.bubble):.1%} = {timeline.bubble} of {size}{known}",
        f"most micro-batches held at once, by rank: {peaks}{share}",
    ]


def ends_of(values: Sequence[Any]) -> list[Any]:
    """All of a few; of many the ends."""
    return list(values) if len(values) <= 16 else [*values[:4], "...", *values[-4:]]


def decimal(value: Any) -> str:
    return f"{float(value):.3g}" if isinstance(value, Fraction) else str(value)


def title(timeline: Timeline) -> str:
    stages = f", {timeline.stages_per_rank} stages a rank" if timeline.stages_per_rank > 1 else ""
    return f"{timeline.schedule}: {timeline.ranks} ranks, {timeline.micro_batches} micro-batches{stages}"


def letter(timeline: Timeline, slot: TimelineSlot) -> str:
    """Small for a rank's second, fourth, ... stage: that is all a cell has room for."""
    return slot.action.op.lower() if is_even_stage(timeline, slot) else slot.action.op


def is_even_stage(timeline: Timeline, slot: TimelineSlot) -> bool:
    return slot.action.stage // timeline.ranks % 2 == 1


def legend(timeline: Timeline) -> Text:
    text = Text()
    used = {slot.action.op for row in timeline.rows for slot in row}
    for what in (what for what in "FBIW" if what in used):
        text.append(f" {what} ", COLOURS[what])
        if timeline.stages_per_rank > 1:
            text.append(f" {what.lower()} ", LATER[what])
        text.append(f" {MEANINGS[what]}   ")
    return text.append(". waiting")


def notes(timeline: Timeline) -> str:
    """How a rank's stages, and pairs, are told from each other."""
    small = "the rank's second stage" + (", fourth, ..." if timeline.stages_per_rank > 2 else "")
    pairs = "; underlined: run as a pair" if SCHEDULES[timeline.schedule].overlaps_pairs else ""
    return f"small letters: {small}{pairs}" if timeline.stages_per_rank > 1 else ""


def draw_row(timeline: Timeline, row: list[TimelineSlot], slots: int, wide: int) -> Text:
    """The first slots of a rank's row, each `wide` letters wide."""
    text = Text()
    for slot in row:
        start, end = int(slot.start), int(slot.end)
        if start >= slots:
            break
        text.append((".".ljust(wide)) * (start - len(text) // wide), "dim")
        name = f"{letter(timeline, slot)}{slot.action.micro_batch}"
        name = name.ljust((end - start) * wide - 1, "-" if end - start > 1 else " ")
        style = (LATER if is_even_stage(timeline, slot) else COLOURS)[slot.action.op]
        text.append(name, style + (" underline" if slot.paired else "")).append(" ")
    text.append((".".ljust(wide)) * (slots - len(text) // wide), "dim")
    return text


def picture(timeline: Timeline, width: int) -> list[Text]:
    """Folded into bands of as many slots as the terminal is wide."""
    wide = len(str(timeline.micro_batches - 1)) + 2
    margin = len(f"rank {timeline.ranks - 1}  ")
    slots = int(timeline.makespan)
    across = max(5, (width - margin) // wide // 5 * 5)
    bands = min(-(-slots // across), max(1, MAX_LINES // (timeline.ranks + 2)))
    rows = [draw_row(timeline, row, min(slots, bands * across), wide) for row in timeline.rows]
    cuts = [band * across * wide for band in range(1, bands)]
    pieces = [row.divide(cuts) for row in rows]
    lines: list[Text] = []
    for band in range(bands):
        marks = range(band * across, min(slots, (band + 1) * across), 5)
        lines.append(Text("slot".ljust(margin) + "".join(str(mark).ljust(5 * wide) for mark in marks), "dim"))
        for rank, row in enumerate(pieces):
            lines.append(Text(f"rank {rank}".ljust(margin)).append(row[band]))
        lines.append(Text())
    if bands * across < slots:
        lines.append(
            Text(f"slots {bands * across} to {slots - 1} are not shown: fewer --micro, a wider terminal, or --svg FILE")
        )
    return lines


def show(timeline: Timeline, costs: ActionCosts, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    head = [Text(title(timeline), "bold"), legend(timeline), *filter(None, [Text(notes(timeline), "dim")])]
    lines = [*head, Text(), *picture(timeline, console.width)]
    for line in [*lines, *map(Text, describe(timeline, costs))]:
        line.rstrip()
        console.print(line, soft_wrap=True)


def show_all(found: dict[str, Timeline | ConfigError], console: Console | None = None) -> None:
    """One row a kind."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("schedule", "stages a rank", "bubble", "slots", "held, first rank", "last rank"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for kind, row in found.items():
        if isinstance(row, Timeline):
            held = (decimal(row.normalized_peaks[0]), decimal(row.normalized_peaks[-1]))
            # One of V stages is a V-th of a rank's layers, so its slot is a V-th as long.
            slots = Fraction(row.makespan) / row.stages_per_rank
            table.add_row(kind, str(row.stages_per_rank), f"{float(row.bubble):.1%}", decimal(slots), *held)
    if table.row_count:
        console.print(table)
    for refused in (row for row in found.values() if isinstance(row, ConfigError)):
        console.print(Text(f"none: {refused}"), soft_wrap=True)
    console.print(
        "slots: until the last rank is done; a slot of one of V stages a rank counts 1/V, so that kinds compare\n"
        "held: the most micro-batches whose activations a rank holds at once, in units of all its layers",
        style="dim",
        soft_wrap=True,
    )


def schedule_json(timeline: Timeline, costs: ActionCosts, rows: bool = True) -> dict[str, Any]:
    """For machines."""
    exact = bubble_formula(timeline.schedule, timeline.ranks, timeline.micro_batches, timeline.stages_per_rank, costs)
    told: dict[str, Any] = {
        "schedule": timeline.schedule,
        "ranks": timeline.ranks,
        "micro_batches": timeline.micro_batches,
        "stages_per_rank": timeline.stages_per_rank,
        "costs": vars(costs),
        "makespan": timeline.makespan,
        "bubble": float(timeline.bubble),
        "formula": float(exact[1]) if exact else None,
        "idle": timeline.idle,
        "peak_live": timeline.rank_peaks,
        "peak_live_by_stage": {stage: live for row in timeline.stage_peaks for stage, live in sorted(row.items())},
    }
    if rows:
        told["rows"] = [
            [{"action": str(slot.action), "start": slot.start, "end": slot.end} for slot in row]
            for row in timeline.rows
        ]
    return told


def schedules_json(found: dict[str, Timeline | ConfigError], costs: ActionCosts) -> dict[str, Any]:
    return {
        "schedules": [
            schedule_json(row, costs, rows=False)
            if isinstance(row, Timeline)
            else {"schedule": kind, "refused": str(row)}
            for kind, row in found.items()
        ]
    }
