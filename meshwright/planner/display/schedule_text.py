"""A pipeline schedule on the terminal: a drawing with one row per rank, or a table of all schedules. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.base.terminal.console import make_console
from meshwright.base.topology.schedule_timeline import ActionCosts, Timeline, TimelineSlot, bubble_formula
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.errors import ConfigError

COLORS = {"F": "white on blue", "B": "black on dark_orange", "I": "black on yellow", "W": "black on green"}
EVEN_STAGE_COLORS = {
    "F": "black on sky_blue2",
    "B": "black on light_salmon1",
    "I": "black on khaki1",
    "W": "black on pale_green1",
}
"""The colors of a rank's second, fourth, ... stage."""
OPS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
MAX_LINES = 200
"""The lines of a drawing; longer drawings are truncated with a message."""
MAX_SLOTS = 16
"""The slots of one action in a drawing."""


def integer_costs(forward: int, backward_input: int, weight: int) -> ActionCosts:
    """Returns costs that can be drawn; raises ConfigError if an action takes too many slots."""
    costs = ActionCosts(forward, backward_input, weight)
    for name, slots in vars(costs).items():
        if slots > MAX_SLOTS:
            raise ConfigError(f"{name} takes {slots} slots", f"expected 1 to {MAX_SLOTS}")
    return costs


def describe_timeline(timeline: Timeline, costs: ActionCosts) -> list[str]:
    """Returns the bubble and the micro-batches in flight, in sentences."""
    stages = timeline.stages_per_rank
    formula = bubble_formula(timeline.schedule, timeline.ranks, timeline.micro_batches, stages, costs)
    closed_form = f"; formula {formula[0]} = {formula[1]}" if formula else "; no closed form for these sizes"
    peaks = " ".join(map(str, ends_of(timeline.rank_peaks)))
    normalized = " ".join(map(format_number, ends_of(timeline.normalized_peaks)))
    unit = f", each of 1/{stages} of a rank's layers (in units of all its layers: {normalized})" if stages > 1 else ""
    total = f"{timeline.ranks} ranks x {timeline.makespan} slots"
    return [
        f"bubble {float(timeline.bubble):.1%} = {timeline.bubble} of {total}{closed_form}",
        f"peak micro-batches in flight, by rank: {peaks}{unit}",
    ]


def ends_of(values: Sequence[Any]) -> list[Any]:
    """Returns all values, or the first and last four if there are more than sixteen."""
    return list(values) if len(values) <= 16 else [*values[:4], "...", *values[-4:]]


def format_number(value: Any) -> str:
    return f"{float(value):.3g}" if isinstance(value, Fraction) else str(value)


def title(timeline: Timeline) -> str:
    stages = f", {timeline.stages_per_rank} stages per rank" if timeline.stages_per_rank > 1 else ""
    return f"{timeline.schedule}: {timeline.ranks} ranks, {timeline.micro_batches} micro-batches{stages}"


def letter(timeline: Timeline, slot: TimelineSlot) -> str:
    """Returns the letter of an action, in lower case for a rank's second, fourth, ... stage."""
    return slot.action.op.lower() if is_even_stage(timeline, slot) else slot.action.op


def is_even_stage(timeline: Timeline, slot: TimelineSlot) -> bool:
    return slot.action.stage // timeline.ranks % 2 == 1


def legend(timeline: Timeline) -> Text:
    text = Text()
    used = {slot.action.op for row in timeline.rows for slot in row}
    for op in (op for op in OPS if op in used):
        text.append(f" {op} ", COLORS[op])
        if timeline.stages_per_rank > 1:
            text.append(f" {op.lower()} ", EVEN_STAGE_COLORS[op])
        text.append(f" {OPS[op]}   ")
    return text.append(". idle")


def legend_notes(timeline: Timeline) -> str:
    """Says how the stages of a rank, and overlapped pairs, are marked."""
    stages = "the rank's second stage" + (", fourth, ..." if timeline.stages_per_rank > 2 else "")
    pairs = "; underlined: overlapped pair" if SCHEDULES[timeline.schedule].overlaps_pairs else ""
    return f"lower case: {stages}{pairs}" if timeline.stages_per_rank > 1 else ""


def draw_row(timeline: Timeline, row: list[TimelineSlot], slots: int, slot_width: int) -> Text:
    """Draws the first slots of a rank."""
    text = Text()
    for slot in row:
        start, end = int(slot.start), int(slot.end)
        if start >= slots:
            break
        text.append((".".ljust(slot_width)) * (start - len(text) // slot_width), "dim")
        name = f"{letter(timeline, slot)}{slot.action.micro_batch}"
        name = name.ljust((end - start) * slot_width - 1, "-" if end - start > 1 else " ")
        style = (EVEN_STAGE_COLORS if is_even_stage(timeline, slot) else COLORS)[slot.action.op]
        text.append(name, style + (" underline" if slot.paired else "")).append(" ")
    text.append((".".ljust(slot_width)) * (slots - len(text) // slot_width), "dim")
    return text


def draw_timeline(timeline: Timeline, width: int) -> list[Text]:
    """Draws all ranks, in bands of as many slots as fit into the width."""
    slot_width = len(str(timeline.micro_batches - 1)) + 2
    margin = len(f"rank {timeline.ranks - 1}  ")
    slots = int(timeline.makespan)
    slots_per_band = max(5, (width - margin) // slot_width // 5 * 5)
    bands = min(-(-slots // slots_per_band), max(1, MAX_LINES // (timeline.ranks + 2)))
    rows = [draw_row(timeline, row, min(slots, bands * slots_per_band), slot_width) for row in timeline.rows]
    cuts = [band * slots_per_band * slot_width for band in range(1, bands)]
    divided = [row.divide(cuts) for row in rows]
    lines: list[Text] = []
    for band in range(bands):
        ticks = range(band * slots_per_band, min(slots, (band + 1) * slots_per_band), 5)
        lines.append(Text("slot".ljust(margin) + "".join(str(tick).ljust(5 * slot_width) for tick in ticks), "dim"))
        for rank, row in enumerate(divided):
            lines.append(Text(f"rank {rank}".ljust(margin)).append(row[band]))
        lines.append(Text())
    if bands * slots_per_band < slots:
        hidden = f"slots {bands * slots_per_band} to {slots - 1} are not shown"
        lines.append(Text(f"{hidden}; try a smaller --micro, a wider terminal, or --svg FILE"))
    return lines


def show_schedule(timeline: Timeline, costs: ActionCosts, console: Console | None = None) -> None:
    console = console or make_console()
    head = [Text(title(timeline), "bold"), legend(timeline), *filter(None, [Text(legend_notes(timeline), "dim")])]
    for line in head:
        console.print(line)
    for line in [Text(), *draw_timeline(timeline, console.width)]:
        line.rstrip()
        console.print(line, soft_wrap=True)
    for sentence in describe_timeline(timeline, costs):
        console.print(Text(sentence))


def show_schedules(timelines: dict[str, Timeline | ConfigError], console: Console | None = None) -> None:
    """Compares all schedules in a table with one row per schedule."""
    console = console or make_console()
    table = Table(box=None, pad_edge=False)
    for name in ("schedule", "stages\nper rank", "bubble", "slots", "in flight,\nfirst rank", "in flight,\nlast rank"):
        table.add_column(name, justify="left" if name == "schedule" else "right", vertical="bottom", overflow="fold")
    for name, timeline in timelines.items():
        if isinstance(timeline, Timeline):
            peaks = timeline.normalized_peaks
            # One of V stages per rank has 1/V of the rank's layers, so its slot is 1/V as long.
            slots = Fraction(timeline.makespan) / timeline.stages_per_rank
            cells = (f"{float(timeline.bubble):.1%}", format_number(slots))
            in_flight = (format_number(peaks[0]), format_number(peaks[-1]))
            table.add_row(name, str(timeline.stages_per_rank), *cells, *in_flight)
    if table.row_count:
        console.print(table)
    for error in (row for row in timelines.values() if isinstance(row, ConfigError)):
        console.print(Text(f"not available: {error}"))
    for note in (
        "slots: length of the step; with V stages per rank, a slot counts 1/V, so that schedules compare",
        "in flight: peak number of micro-batches whose activations a rank keeps, in units of all its layers",
    ):
        console.print(Text(note, "dim"))


def schedule_json(timeline: Timeline, costs: ActionCosts, rows: bool = True) -> dict[str, Any]:
    stages = timeline.stages_per_rank
    formula = bubble_formula(timeline.schedule, timeline.ranks, timeline.micro_batches, stages, costs)
    record: dict[str, Any] = {
        "schedule": timeline.schedule,
        "ranks": timeline.ranks,
        "micro_batches": timeline.micro_batches,
        "stages_per_rank": stages,
        "costs": vars(costs),
        "makespan": timeline.makespan,
        "bubble": float(timeline.bubble),
        "bubble_formula": float(formula[1]) if formula else None,
        "idle": timeline.idle,
        "peak_in_flight": timeline.rank_peaks,
        "peak_in_flight_by_stage": {stage: peak for row in timeline.stage_peaks for stage, peak in sorted(row.items())},
    }
    if rows:
        record["rows"] = [
            [{"action": str(slot.action), "start": slot.start, "end": slot.end} for slot in row]
            for row in timeline.rows
        ]
    return record


def schedules_json(timelines: dict[str, Timeline | ConfigError], costs: ActionCosts) -> dict[str, Any]:
    return {
        "schedules": [
            schedule_json(row, costs, rows=False)
            if isinstance(row, Timeline)
            else {"schedule": name, "error": str(row)}
            for name, row in timelines.items()
        ]
    }
