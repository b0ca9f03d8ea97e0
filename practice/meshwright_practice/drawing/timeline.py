"""Draws intervals on lanes as rows of a Gantt chart. Torch-free."""

from __future__ import annotations

import re

from rich.text import Text

from meshwright_practice.drawing.palette import color, format_figure, legend, short_label
from meshwright_practice.pictures import GanttChart, Span

MAX_ROWS = 32
MAX_TICK_CELLS = 6


def draw_timeline(timeline: GanttChart, width: int, has_colors: bool) -> list[Text]:
    """One row per lane, more where its spans overlap, the axis of time, and a legend of the groups of spans."""
    if not timeline.spans:
        return [Text("no spans", "dim")]
    rows = lane_rows(timeline.spans)
    groups = list(dict.fromkeys(group(span.name) for span in timeline.spans))
    begin, end = min(span.begin for span in timeline.spans), max(span.end for span in timeline.spans)
    label_width = max(len(short_label(lane)) for lane, _ in rows)
    cells = max(10, width - label_width - 2)
    scale = cells_per_unit(timeline, end - begin, cells)
    used = max(1, round((end - begin) * scale))
    lines, previous = [], ""
    for lane, spans in rows[:MAX_ROWS]:
        line = Text(f"{short_label(lane) if lane != previous else '':>{label_width}} ")
        line.append("│", "dim").append_text(draw_row(spans, begin, scale, used, groups, has_colors))
        lines.append(line)
        previous = lane
    if len(rows) > MAX_ROWS:
        lines.append(Text(f"and {len(rows) - MAX_ROWS} more rows", "dim"))
    lines.append(time_axis(begin, end, timeline.unit, label_width, used))
    if len(groups) > 1 and has_colors:
        lines += legend(groups, has_colors, width, label_width + 2)
    return lines


def group(name: str) -> str:
    """Spans that differ in a number only belong together: F0 and F1, "bucket 2" and "bucket 3"."""
    return re.sub(r"[\s_-]*\d+", "", name).strip() or name


def cells_per_unit(timeline: GanttChart, length: float, cells: int) -> float:
    """A whole number of cells per tick if the times are ticks, so that equal spans look equal."""
    scale = cells / (length or 1.0)
    whole = all(time == int(time) for span in timeline.spans for time in (span.begin, span.end))
    return float(min(MAX_TICK_CELLS, int(scale))) if whole and scale >= 1 else scale


def lane_rows(spans: tuple[Span, ...]) -> list[tuple[str, list[Span]]]:
    """The lanes in the order of their first spans; spans of a lane that overlap are put below each other."""
    lanes: dict[str, list[list[Span]]] = {}
    for span in spans:
        lanes.setdefault(span.lane, [])
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        rows = lanes[span.lane]
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return [(lane, row) for lane, rows in lanes.items() for row in rows]


def draw_row(spans: list[Span], begin: float, scale: float, cells: int, groups: list[str], has_colors: bool) -> Text:
    row, at = Text(), 0
    for span in spans:
        first = max(at, round((span.begin - begin) * scale))
        last = min(cells, max(first + 1, round((span.end - begin) * scale)))
        if last <= first:
            continue
        row.append("·" * (first - at), "dim")
        number = groups.index(group(span.name))
        row.append_text(draw_span(span.name, last - first, number, has_colors))
        at = last
    return row.append("·" * (cells - at), "dim")


def draw_span(name: str, cells: int, number: int, has_colors: bool) -> Text:
    """A span with its name if there is room. Neighbours of one color are told apart by a line at their beginning."""
    if not has_colors:
        text = name if len(name) < cells else name[0] * (cells > 1)
        return Text(("|" + text + "=" * cells)[:cells])
    text = name if len(name) < cells else ""
    style = f"black on {color(number)}"
    return Text(f"▏{text}".ljust(cells)[:cells], style)


def time_axis(begin: float, end: float, unit: str, label_width: int, cells: int) -> Text:
    left, right = format_figure(begin, unit), format_figure(end, unit)
    gap = max(1, cells - len(left) - len(right))
    return Text(f"{'':>{label_width}}  {left}{' ' * gap}{right}", "dim")
