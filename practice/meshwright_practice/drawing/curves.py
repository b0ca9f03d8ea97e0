"""Draws lines over a common axis, in braille dots or in letters where there are no colors. Torch-free."""

from __future__ import annotations

import math
from itertools import pairwise

from rich.text import Text

from meshwright_practice.drawing.palette import color, format_number
from meshwright_practice.pictures import Curves

HEIGHT = 12
MAX_CELLS = 72
MARKS = "ox+*#@%&"
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bits of a braille character by column and row."""
LOG_RATIO = 1000.0
"""From this ratio of the largest to the smallest value on, the axis is logarithmic."""


def draw_curves(curves: Curves, width: int, has_colors: bool) -> list[Text]:
    """A grid with the lines, both axes, and a legend."""
    points = {name: list(zip(curves.x, line, strict=True)) for name, line in curves.lines.items()}
    points = {name: [p for p in line if math.isfinite(p[1]) and math.isfinite(p[0])] for name, line in points.items()}
    values = [y for line in points.values() for _, y in line]
    if not values:
        return [Text("no values", "dim")]
    logarithmic = min(values) > 0 and max(values) / min(values) >= LOG_RATIO
    transform = math.log10 if logarithmic else float
    low, high = transform(min(values)), transform(max(values))
    left, right = min(curves.x), max(curves.x)
    ticks = {0: max(values), HEIGHT - 1: min(values)}
    middle = (low + high) / 2
    ticks[HEIGHT // 2] = 10**middle if logarithmic else middle
    tick_width = max(len(format_number(tick)) for tick in ticks.values())
    cells = min(MAX_CELLS, max(10, width - tick_width - 2))
    columns, rows = (cells * 2, HEIGHT * 4) if has_colors else (cells, HEIGHT)
    grid: dict[tuple[int, int], tuple[int, int]] = {}
    for number, line in enumerate(points.values()):
        places = [(place(x, left, right, columns), rows - 1 - place(transform(y), low, high, rows)) for x, y in line]
        for column, row in connect(places):
            cell = (column // 2, row // 4) if has_colors else (column, row)
            dots = DOTS[column % 2][row % 4] if has_colors else 0
            before = grid.get(cell, (0, 0))[0]
            grid[cell] = (before | dots, number)
    lines = []
    for row in range(HEIGHT):
        tick = format_number(ticks[row]) if row in ticks and (row == 0 or high > low) else ""
        text = Text(f"{tick:>{tick_width}} ").append("│", "dim")
        for column in range(cells):
            dots, number = grid.get((column, row), (0, -1))
            letter = " " if number < 0 else chr(0x2800 + dots) if has_colors else MARKS[number % len(MARKS)]
            text.append(letter, color(number) if number >= 0 else "")
        text.rstrip()
        lines.append(text)
    lines.append(Text(f"{'':>{tick_width}} └{'─' * cells}", "dim"))
    ends = (format_number(left), format_number(right))
    name = curves.x_label.center(max(0, cells - len(ends[0]) - len(ends[1])))
    lines.append(Text(f"{'':>{tick_width}}  {ends[0]}{name}{ends[1]}", "dim"))
    lines += curve_legend(list(points), has_colors, width, tick_width + 2)
    if logarithmic:
        lines.append(Text(f"{'':>{tick_width + 2}}the axis of {curves.y_label} is logarithmic", "dim"))
    return lines


def place(value: float, low: float, high: float, count: int) -> int:
    return round((value - low) / (high - low) * (count - 1)) if high > low else 0


def connect(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """All grid points of the lines between successive points."""
    found = places[:1]
    for (column, row), (next_column, next_row) in pairwise(places):
        steps = max(abs(next_column - column), abs(next_row - row), 1)
        found += [
            (round(column + (next_column - column) * step / steps), round(row + (next_row - row) * step / steps))
            for step in range(1, steps + 1)
        ]
    return found


def curve_legend(names: list[str], has_colors: bool, width: int, indent: int) -> list[Text]:
    lines: list[Text] = []
    for number, name in enumerate(names):
        mark = "━━" if has_colors else MARKS[number % len(MARKS)]
        entry = Text.assemble((mark, color(number)), f" {name}")
        if lines and len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(Text(" " * indent).append_text(entry))
    return lines
