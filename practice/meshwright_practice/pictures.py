"""Pictures of an experiment as data; the terminal and the page draw the same ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bars:
    """Labelled bars, each divided into parts, such as memory by class or bytes by collective."""

    title: str
    unit: str
    labels: tuple[str, ...]
    parts: dict[str, tuple[float, ...]]
    """part -> one value per label"""


@dataclass(frozen=True)
class Span:
    """One interval on a lane of a timeline."""

    lane: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class GanttChart:
    """Intervals on lanes, such as phases per rank. Times are seconds, or ticks where order is what counts."""

    title: str
    unit: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class HeatMap:
    """A table of numbers, such as the load of every expert per step."""

    title: str
    unit: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Curves:
    """Lines over a common axis, such as losses over steps."""

    title: str
    x_label: str
    y_label: str
    x: tuple[float, ...]
    lines: dict[str, tuple[float, ...]] = field(default_factory=dict)


Picture = Bars | GanttChart | HeatMap | Curves
PICTURES = {"bars": Bars, "timeline": GanttChart, "heat map": HeatMap, "curves": Curves}


def picture_to_json(picture: Picture) -> dict[str, Any]:
    """The fields of a picture as plain JSON, and its `type`, one of PICTURES."""
    name = next(name for name, kind in PICTURES.items() if isinstance(picture, kind))
    return {"type": name} | asdict(picture)


def picture_from_json(value: dict[str, Any]) -> Picture:
    """The picture that `picture_to_json` wrote."""
    fields = {name: as_tuples(item) for name, item in value.items() if name != "type"}
    if value["type"] == "timeline":
        fields["spans"] = tuple(Span(**span) for span in value["spans"])
    picture: Picture = PICTURES[value["type"]](**fields)
    return picture


def as_tuples(value: Any) -> Any:
    """JSON has lists where pictures have tuples."""
    if isinstance(value, dict):
        return {name: as_tuples(item) for name, item in value.items()}
    return tuple(as_tuples(item) for item in value) if isinstance(value, list | tuple) else value
