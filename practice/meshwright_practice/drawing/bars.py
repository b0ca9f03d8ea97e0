"""Draws labelled bars with their parts, such as memory by class. Torch-free."""

from __future__ import annotations

from rich.text import Text

from meshwright_practice.drawing.palette import color, fill, format_figure, legend, short_label
from meshwright_practice.pictures import Bars

EIGHTHS = " ▏▎▍▌▋▊▉"
MAX_ROWS = 32


def draw_bars(bars: Bars, width: int, has_colors: bool) -> list[Text]:
    """One line per label, and a legend if there are several parts."""
    totals = [sum(max(0.0, values[row]) for values in bars.parts.values()) for row in range(len(bars.labels))]
    figures = [format_figure(total, bars.unit) for total in totals]
    labels = [short_label(label) for label in bars.labels]
    label_width, figure_width = max(map(len, labels), default=0), max(map(len, figures), default=0)
    cells = max(10, width - label_width - figure_width - 4)
    scale = cells / (max(totals, default=0.0) or 1.0)
    lines = []
    for row, label in list(enumerate(labels))[:MAX_ROWS]:
        line = Text(f"{label:>{label_width}} ")
        line.append("│", "dim")
        line.append_text(draw_bar([values[row] for values in bars.parts.values()], scale, has_colors))
        lines.append(line.append(f" {figures[row]}"))
    if len(labels) > MAX_ROWS:
        lines.append(Text(f"and {len(labels) - MAX_ROWS} more", "dim"))
    if len(bars.parts) > 1:
        lines += legend(list(bars.parts), has_colors, width, label_width + 2)
    return lines


def draw_bar(values: list[float], scale: float, has_colors: bool) -> Text:
    """The parts of one bar. A part that is not zero has at least a thin line, so that it is seen to exist."""
    bar, total = Text(), 0.0
    for number, value in enumerate(values):
        begin, total = total, total + max(0.0, value) * scale
        count = round(total) - round(begin)
        bar.append(fill(number, has_colors) * count, color(number))
    rest = total - round(total)
    last = next((number for number in reversed(range(len(values))) if values[number] > 0), None)
    if last is not None and has_colors and rest >= 1 / 8:
        bar.append(EIGHTHS[int(rest * 8)], color(last))
    elif last is not None and not len(bar):
        bar.append("▏", color(last))
    return bar
