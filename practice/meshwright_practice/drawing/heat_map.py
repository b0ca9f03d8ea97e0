"""Draws a table of numbers as cells whose color says how large they are. Torch-free."""

from __future__ import annotations

from rich.text import Text

from meshwright_practice.drawing.palette import format_figure, format_number, short_label
from meshwright_practice.pictures import HeatMap

RAMP = ("#0b2440", "#123f66", "#1c5f83", "#2d8294", "#56a58f", "#95c17e", "#d8d36b", "#fbe15c")
DARK = 4
"""Colors of the ramp on which text is light."""
SHADES = " ░▒▓█"
MAX_ROWS = 32
MIN_CELL, MAX_CELL = 2, 9


def draw_heat_map(heat_map: HeatMap, width: int, has_colors: bool) -> list[Text]:
    """One line per row. Columns that do not fit are averaged in groups, and a line says so."""
    labels = [short_label(row) for row in heat_map.rows]
    label_width = max(map(len, labels), default=0)
    room = max(MIN_CELL, width - label_width - 2)
    columns, values, per_cell = fold_columns(heat_map, max(1, room // MIN_CELL))
    numbers = [value for row in values for value in row]
    if not numbers:
        return [Text("no values", "dim")]
    low, high = min(numbers), max(numbers)
    written = [[format_number(value) for value in row] for row in values]
    wanted = max(len(text) for texts in (*written, columns) for text in texts) + 2
    cell = max(MIN_CELL, min(MAX_CELL, wanted, room // len(columns)))
    shows_numbers = all(len(text) < cell for row in written for text in row)
    lines = []
    if cell >= 3:
        header = "".join(f"{short_label(column, cell - 1):^{cell}}" for column in columns)
        lines.append(Text(f"{'':>{label_width}} {header}", "dim"))
    for label, row, texts in list(zip(labels, values, written, strict=True))[:MAX_ROWS]:
        line = Text(f"{label:>{label_width}} ")
        for value, text in zip(row, texts, strict=True):
            level = (value - low) / ((high - low) or 1.0)
            line.append_text(draw_cell(text if shows_numbers else "", level, cell, has_colors))
        lines.append(line)
    if len(labels) > MAX_ROWS:
        lines.append(Text(f"and {len(labels) - MAX_ROWS} more rows", "dim"))
    lines.append(scale_line(low, high, heat_map.unit, label_width, has_colors))
    if per_cell > 1:
        lines.append(Text(f"{'':>{label_width}} every cell is the mean of {per_cell} columns", "dim"))
    return lines


def fold_columns(heat_map: HeatMap, room: int) -> tuple[list[str], list[list[float]], int]:
    """The columns, the values and how many columns each cell averages."""
    per_cell = -(-len(heat_map.columns) // room) if heat_map.columns else 1
    starts = range(0, len(heat_map.columns), per_cell)
    values = [[mean(row[start : start + per_cell]) for start in starts] for row in heat_map.values]
    return [heat_map.columns[start] for start in starts], values, per_cell


def mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def draw_cell(text: str, level: float, cell: int, has_colors: bool) -> Text:
    if not has_colors:
        shade = SHADES[min(len(SHADES) - 1, int(level * len(SHADES)))]
        return Text(f"{text:>{cell - 1}} " if text else shade * (cell - 1) + " ")
    index = min(len(RAMP) - 1, int(level * len(RAMP)))
    return Text(f"{text:^{cell}}", f"{'white' if index < DARK else 'black'} on {RAMP[index]}")


def scale_line(low: float, high: float, unit: str, label_width: int, has_colors: bool) -> Text:
    """What the darkest and the brightest color stand for."""
    line = Text(f"{'':>{label_width}} {format_figure(low, unit)} ", "dim")
    if has_colors:
        for tone in RAMP:
            line.append("  ", f"on {tone}")
    else:
        line.append("".join(shade * 2 for shade in SHADES))
    return line.append(f" {format_figure(high, unit)}")
