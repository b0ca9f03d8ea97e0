"""Draws any picture on a console. Torch-free."""

from __future__ import annotations

from rich.console import Console, Group
from rich.text import Text

from meshwright_practice.drawing.bars import draw_bars
from meshwright_practice.drawing.curves import draw_curves
from meshwright_practice.drawing.heat_map import draw_heat_map
from meshwright_practice.drawing.palette import COUNT
from meshwright_practice.drawing.timeline import draw_timeline
from meshwright_practice.pictures import Bars, Curves, HeatMap, Picture

MAX_WIDTH = 100


def draw(picture: Picture, console: Console) -> Group:
    """A title and the picture, at most as wide as the console."""
    width, has_colors = min(MAX_WIDTH, console.width - 1), console.color_system is not None
    match picture:
        case Bars():
            unit, lines = picture.unit, draw_bars(picture, width, has_colors)
        case HeatMap():
            unit, lines = picture.unit, draw_heat_map(picture, width, has_colors)
        case Curves():
            unit, lines = picture.y_label, draw_curves(picture, width, has_colors)
        case _:
            unit, lines = picture.unit, draw_timeline(picture, width, has_colors)
    title = Text(picture.title, "bold")
    if unit and unit != COUNT and unit.lower() not in picture.title.lower():
        title.append(f" ({unit})", "dim")
    return Group(title, *lines)
