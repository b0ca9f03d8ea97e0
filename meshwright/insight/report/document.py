"""The content of a report, which the HTML page, the Markdown file and the notebook view render alike. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = (0,)
    """the columns that are aligned to the left; the others have numbers"""
    marked_rows: Sequence[int] = ()
    """rows with a difference or a failure"""


@dataclass(frozen=True)
class Curve:
    """A curve over the steps of a run, in a box of 1000 x 200 units."""

    name: str
    points: str
    """the points of a polyline"""
    band: str
    """the points of the polygon between the smallest and the largest value of each bin; empty if there are no bins"""
    low: str
    high: str
    """the labels of the vertical axis"""
    first: str
    last: str
    """the labels of the horizontal axis"""
    marks: Sequence[tuple[float, str]] = ()
    """positions of restarts, with their labels"""
    css_class: str = "blue"


@dataclass(frozen=True)
class Bar:
    """A stacked bar: its segments are (CSS class, start, width, label), in units of which the picture has 1000."""

    label: str
    segments: Sequence[tuple[str, float, float, str]]
    total: str


@dataclass(frozen=True)
class BarChart:
    """Stacked bars with one scale, and the legend of their segments as (CSS class, label)."""

    title: str
    bars: Sequence[Bar]
    legend: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """A part of a report. A picture shows figures that a table or a sentence of the same section states."""

    title: str
    sentences: Sequence[str] = ()
    items: Sequence[str] = ()
    """a list after the sentences"""
    tables: Sequence[Table] = ()
    curves: Sequence[Curve] = ()
    bars: Sequence[BarChart] = ()
    code: str = ""
    """lines of a file or a command"""
    notes: Sequence[str] = ()
    parts: Sequence[Section] = ()


@dataclass(frozen=True)
class Headline:
    """One of the three headline signals: its figure, and the facts under it as (name, value)."""

    name: str
    figure: str
    facts: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class RunDocument:
    """The report of a run."""

    title: str
    state: str
    tone: str
    """good, bad, warn or info: how the state is shown"""
    sentence: str
    """what the run does, or how it ended"""
    verdict: str
    """measured against predicted, in one sentence"""
    status: str
    headlines: Sequence[Headline]
    warnings: Sequence[str] = ()
    """what a reader must know before the figures"""
    sections: Sequence[Section] = field(default_factory=list)
    written: str = ""
    """when and by which version the report was written"""
