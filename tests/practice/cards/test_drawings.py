"""Pictures on the terminal fit into 80 columns, say what they show without colors, and survive odd values."""

from __future__ import annotations

import io
import math

import pytest
from meshwright_practice.drawing.draw import draw
from meshwright_practice.drawing.palette import format_number, format_quantity
from meshwright_practice.pictures import Bars, Curves, GanttChart, HeatMap, Span, picture_from_json, picture_to_json
from rich.console import Console

BARS = Bars("Memory", "bytes", ("DDP", "a label that is much longer than the room"), {"p": (4e6, 1e6), "g": (2e6, 0.0)})
SPANS = tuple(Span(f"rank {r}", f"F{m}", float(r + m), float(r + m + 1)) for r in range(2) for m in range(3))
TIMELINE = GanttChart("Schedule", "ticks", SPANS)
HEAT = HeatMap("Load", "tokens", ("e0", "e1"), tuple(f"step {n}" for n in range(4)), ((0.0, 1, 2, 3), (4, 5, 6, 7.5)))
CURVES = Curves("Loss", "step", "nats", (0.0, 1.0, 2.0), {"a": (3.0, 2.0, 1.0), "b": (1.0, math.nan, 2.0)})
WIDE = HeatMap("Load", "", ("e",), tuple(map(str, range(500))), (tuple(map(float, range(500))),))
EMPTY = [Bars("t", "", (), {}), GanttChart("t", "s", ()), HeatMap("t", "", (), (), ()), Curves("t", "x", "y", (), {})]
FLAT = [
    Bars("t", "", ("a",), {"p": (0.0,)}),
    HeatMap("t", "", ("a",), ("b",), ((5.0,),)),
    Curves("t", "x", "y", (1.0,), {"l": (2.0,)}),
]
SEVERAL = [BARS, TIMELINE, HEAT, CURVES, WIDE]


def drawn(picture, colors=None, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=colors, force_terminal=colors is not None)
    console.print(draw(picture, console))
    return console.file.getvalue()


@pytest.mark.parametrize("picture", SEVERAL + EMPTY + FLAT, ids=lambda picture: type(picture).__name__)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_pictures_fit_into_the_width(picture, width):
    lines = drawn(picture, width=width).splitlines()
    assert lines[0].startswith(picture.title)
    assert max(map(len, lines)) <= width
    assert drawn(picture, "truecolor", width)


@pytest.mark.parametrize("picture", SEVERAL + EMPTY, ids=lambda picture: type(picture).__name__)
def test_pictures_survive_json(picture):
    assert repr(picture_from_json(picture_to_json(picture))) == repr(picture)


def test_bars_have_lengths_in_proportion_and_a_legend():
    first, second, legend = drawn(BARS).splitlines()[1:4]
    assert first.count("█") == 2 * first.count("▒")
    assert first.count("█") == pytest.approx(4 * second.count("█"), abs=4)
    assert "5.72 MiB" in first
    assert "a label that is much longer…" in second
    assert "██ p" in legend
    assert "▒▒ g" in legend


def test_timeline_aligns_ticks_and_stacks_overlapping_spans():
    rows = drawn(TIMELINE).splitlines()[1:3]
    assert rows[0].endswith("|F0===|F1===|F2===······")
    assert rows[1].endswith("······|F0===|F1===|F2===")
    overlapping = GanttChart("t", "s", (Span("gpu", "compute", 0, 2), Span("gpu", "comm", 1, 3)))
    assert len([line for line in drawn(overlapping).splitlines() if "│" in line]) == 2


def test_heat_map_writes_values_and_folds_columns_that_do_not_fit():
    assert "7.5" in drawn(HEAT)
    assert "step 3" in drawn(HEAT)
    assert "every cell is the mean of" in drawn(WIDE)


def test_curves_mark_lines_without_colors_and_use_a_logarithmic_axis_for_wide_ranges():
    text = drawn(CURVES)
    assert "o a" in text
    assert "x b" in text
    wide = Curves("Error", "n", "error", (0.0, 1.0), {"e": (1.0, 1e-6)})
    assert "the axis of error is logarithmic" in drawn(wide)


def test_numbers_are_written_with_their_unit():
    assert format_quantity(12288.0, "messages") == "12,288 messages"
    assert format_quantity(2**20, "bytes") == "1 MiB"
    assert format_quantity(0.0125, "s") == "12.5 ms"
    assert [format_number(value) for value in (0.75, 1e-7, 3.0, math.inf, math.nan)] == [
        "0.75",
        "1.000e-07",
        "3",
        "inf",
        "nan",
    ]
