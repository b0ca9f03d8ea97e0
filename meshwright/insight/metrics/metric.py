"""What a metric is: its name, kind, unit and labels, and how it is read from the history of a run. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from statistics import median
from typing import Literal

import numpy as np

from meshwright.base.history.goodput import GoodputAccount
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.signals import Signals
from meshwright.base.history.step_table import StepTable
from meshwright.base.io import printable

Kind = Literal["gauge", "counter", "histogram"]
MAX_RANKS = 64
"""Ranks that have series of their own. With more ranks, gauges have the smallest, median and largest value over all
ranks, and counters the sum, so that the number of series does not grow with the job."""
AGGREGATES: dict[Kind, dict[str, Callable[[list[float]], float]]] = {
    "gauge": {"min": min, "median": median, "max": max},
    "counter": {"sum": sum},
}
"""What stands in place of the number of a rank beyond MAX_RANKS."""
MAX_LABEL = 128
"""Characters of a label value."""


@dataclass(frozen=True)
class Histogram:
    """The distribution of a value: (upper bound, number of values up to it), and the sum of all values."""

    buckets: tuple[tuple[float, int], ...]
    sum: float


LabelValues = tuple[str | int, ...]
"""A rank is an integer."""
Reading = tuple[LabelValues, float | Histogram | None]
"""The label values, and the value; None and NaN are not exported."""


@dataclass(frozen=True)
class Snapshot:
    """What is known about a run at one moment."""

    history: RunHistory
    signals: Signals
    account: GoodputAccount
    run: str
    """value of the label `run`"""
    run_id: str
    clock: float
    """this host's monotonic clock"""
    network: dict[str, tuple[int, int]]
    """bytes that the interfaces of this host received and transmitted"""

    @cached_property
    def steps(self) -> StepTable:
        """The recorded steps of rank 0, through all attempts."""
        return self.history.steps(0)

    @cached_property
    def ranks(self) -> list[int]:
        return self.history.ranks

    def newest(self, column: str) -> float | None:
        """The value of the newest step of rank 0 in a column of the step table."""
        return float(self.steps.column(column)[-1]) if len(self.steps) else None

    def mean_of_ranks(self, column: str) -> Iterator[Reading]:
        """The mean of a column over the newest steps of every rank."""
        for rank in self.ranks:
            yield (rank,), mean(self.recent(rank).column(column))

    def recent(self, rank: int) -> StepTable:
        """The newest timed steps of a rank, over which the headline signals are averaged, too."""
        if rank not in self._recent:
            self._recent[rank] = self.history.steps(rank).recent_timed()
        return self._recent[rank]

    @cached_property
    def _recent(self) -> dict[int, StepTable]:
        return {}


def mean(values: np.ndarray) -> float | None:
    """The mean of the values that are recorded, or None if none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


@dataclass(frozen=True)
class Metric:
    """One row of the registry."""

    name: str
    """with the unit as its suffix, and `_total` if it is a counter"""
    kind: Kind
    unit: str
    """seconds, bytes, ratio and so on; empty for a number without a unit"""
    labels: tuple[str, ...]
    """in addition to `run`, which every metric has"""
    section: str
    """the row of the dashboard that shows it"""
    help: str
    read: Callable[[Snapshot], Iterable[Reading]]
    chart: str = ""
    """PromQL expression of its chart, with `$filter` for the runs and `$window` for the range of a rate; empty: the
    metric itself, or the rate of a counter"""

    @property
    def query(self) -> str:
        """The expression that shows the metric."""
        of_counter = f"rate({self.name}$filter[$window])"
        return self.chart or (of_counter if self.kind == "counter" else f"{self.name}$filter")

    def readings(self, snapshot: Snapshot) -> Iterator[tuple[tuple[str, ...], float | Histogram]]:
        """The label values and values to export, each series once, with ranks aggregated if there are too many."""
        groups: dict[tuple[str, ...], list[float | Histogram]] = {}
        position = self.labels.index("rank") if "rank" in self.labels and len(snapshot.ranks) > MAX_RANKS else None
        for labels, value in self.read(snapshot):
            if value is not None and (isinstance(value, Histogram) or isfinite(value)):
                kept = labels if position is None else (*labels[:position], *labels[position + 1 :])
                groups.setdefault(tuple(label_text(str(label)) for label in kept), []).append(value)
        for group, values in groups.items():
            if position is None:
                yield group, values[0]
            else:
                numbers = [value for value in values if not isinstance(value, Histogram)]
                for name, combine in AGGREGATES[self.kind].items():
                    yield (*group[:position], name, *group[position:]), float(combine(numbers))


def label_text(text: str) -> str:
    """A label value as a scraper accepts it: short printable text that can be encoded."""
    return printable(text[:MAX_LABEL].replace("\n", " ").encode(errors="replace").decode())
