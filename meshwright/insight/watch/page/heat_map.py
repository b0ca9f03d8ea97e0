"""The heat map of a run: seconds per step of every rank, in bins of steps. Torch-free."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import StepTable
from meshwright.insight.watch.page.answers import shorten
from meshwright.insight.watch.page.curves import select_steps

COLUMNS = (20, 240)
"""The smallest and the largest number of bins."""
MAX_CELLS = 16_000
"""Cells of the heat map; with many ranks the bins are wider."""
MAX_RANKS = 512
"""Ranks that have a row. Of more ranks, the slowest ones are shown."""
SCALE = (0.02, 0.5, 0.98)
"""The quantiles of the cells at which the colours begin, the median, and those at which they end."""
MIN_SPREAD, MAX_SPREAD = 1.5, 2.0
"""The scale reaches to at least so many times its low end, so that noise is no pattern, and to at most so many times
the median, or to the median of the slowest rank, so that the slow first steps of an attempt do not hide a slow rank."""

Cells = NDArray[np.float64]


def describe_heat_map(history: RunHistory, columns: int, first: int | None, last: int | None) -> dict[str, Any]:
    """The mean step time, and the mean time that a rank works by itself, of every rank in every bin of steps."""
    tables = {rank: select_steps(history.steps(rank).survived(), first, last) for rank in history.ranks}
    tables = {rank: table for rank, table in tables.items() if len(table)}
    if not tables:
        return {"ranks": [], "range": [0, 0], "columns": 0}
    if len(tables) > MAX_RANKS:
        slowest = sorted(tables, key=lambda rank: -float(tables[rank].local_seconds.mean()))[:MAX_RANKS]
        tables = {rank: tables[rank] for rank in sorted(slowest)}
    low = min(int(table.step[0]) for table in tables.values())
    high = max(int(table.step[-1]) for table in tables.values()) + 1
    columns = max(COLUMNS[0], min(columns, COLUMNS[1], MAX_CELLS // len(tables)))
    columns = min(columns, high - low)
    step = np.stack([bin_means(table, table.seconds, low, high, columns) for table in tables.values()])
    local = np.stack([bin_means(table, table.local_seconds, low, high, columns) for table in tables.values()])
    return {
        "ranks": list(tables),
        "range": [low, high],
        "columns": columns,
        "seconds": describe_cells(step),
        "local": describe_cells(local),
    }


def bin_means(table: StepTable, values: Cells, low: int, high: int, columns: int) -> Cells:
    """The mean of the values in every bin of steps; NaN for a bin without a recorded step."""
    places = (table.step - low) * columns // (high - low)
    counts = np.bincount(places, minlength=columns)
    sums = np.bincount(places, weights=np.nan_to_num(values), minlength=columns)
    means: Cells = np.divide(sums, counts, out=np.full(columns, np.nan), where=counts > 0)
    return means


def describe_cells(cells: Cells) -> dict[str, Any]:
    low, median, high = (float(quantile) for quantile in np.nanquantile(cells, SCALE))
    limit = max(median * MAX_SPREAD, float(np.nanmax(np.nanmedian(cells, axis=1))))
    return {
        "cells": [shorten(row, 3) for row in cells],
        "means": shorten(np.nanmean(cells, axis=1)),
        "scale": [low, max(low * MIN_SPREAD, min(high, limit))],
    }
