"""Computes the curves and stacked bars of a report from columns of numbers. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.insight.report.document import Bar, BarChart, Curve

WIDTH, HEIGHT = 1000.0, 200.0
"""The size of a curve's box, which the page stretches to the width of the window."""
LOG_RATIO = 50.0
"""A curve whose largest value exceeds its smallest by this factor has a logarithmic scale."""
MIN_SHARE = 1e-4
"""Segments below this fraction of a bar are not drawn."""
PHASE_CLASSES = {
    "fetch": "gold",
    "copy": "brown",
    "forward": "blue",
    "backward": "teal",
    "sync": "orange",
    "update": "green",
    "wait": "red",
}
"""The color of every phase; `wait` is a wait for other ranks inside a phase."""

Column = NDArray[np.float64]


def make_curve(
    name: str,
    steps: Column,
    bins: tuple[Column, Column, Column],
    form: Callable[[float], str],
    restarts: Mapping[int, str],
    css_class: str,
) -> Curve | None:
    """Draws the mean of each bin as a line, and the smallest to the largest value as a band.

    Args:
        name: what the curve shows.
        steps: the first step of each bin, ascending.
        bins: smallest, mean and largest value of each bin; NaN if there is none.
        form: formats a value for the axis.
        restarts: labels of restarts by the step from which on they train.
        css_class: the color.

    Returns:
        the curve, or None if no bin has a value.
    """
    low, mean, high = bins
    known = np.isfinite(mean) & np.isfinite(low) & np.isfinite(high)
    if not known.any():
        return None
    steps, low, mean, high = steps[known].astype(float), low[known], mean[known], high[known]
    smallest, largest = float(low.min()), float(high.max())
    logarithmic = smallest > 0 and largest / smallest > LOG_RATIO
    first, last = float(steps[0]), float(steps[-1])

    def across(step: Column) -> Column:
        return np.clip((step - first) / max(last - first, 1.0), 0.0, 1.0) * WIDTH

    def down(values: Column) -> Column:
        bottom, top, shown = smallest, largest, values
        if logarithmic:
            bottom, top, shown = np.log(bottom), np.log(top), np.log(values)
        return HEIGHT - 4 - (shown - bottom) / (top - bottom if top > bottom else 1.0) * (HEIGHT - 8)

    x = across(steps)
    band = ""
    if np.any(high > low):
        band = point_list(np.concatenate([x, x[::-1]]), np.concatenate([down(high), down(low)[::-1]]))
    marks = [
        (float(across(np.array([float(step)]))[0]), label) for step, label in restarts.items() if first < step <= last
    ]
    scale = ", logarithmic scale" if logarithmic else ""
    return Curve(
        name + scale,
        point_list(x, down(mean)),
        band,
        form(smallest),
        form(largest),
        f"step {int(first):,}",
        f"step {int(last):,}",
        marks,
        css_class,
    )


def point_list(x: Column, y: Column) -> str:
    return " ".join(f"{left:.1f},{top:.1f}" for left, top in zip(x, y, strict=True))


def make_bars(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    css_classes: Mapping[str, str],
    form: Callable[[float], str],
    names: Mapping[str, str] | None = None,
) -> BarChart:
    """Draws one stacked bar per row; all bars have one scale, so that a longer bar is a larger sum."""
    longest = max((sum(parts.values()) for parts in rows.values()), default=0.0)
    scale = WIDTH / longest if longest > 0 else 0.0
    names = names or {}
    bars = []
    for label, parts in rows.items():
        start, segments = 0.0, []
        for part, value in parts.items():
            if value > MIN_SHARE * longest:
                described = f"{label}, {names.get(part, part)}: {form(value)}"
                segments.append((css_classes.get(part, "grey"), start * scale, value * scale, described))
            start += value
        bars.append(Bar(label, segments, form(start)))
    used = dict.fromkeys(part for parts in rows.values() for part, value in parts.items() if value > 0)
    return BarChart(title, bars, [(css_classes.get(part, "grey"), names.get(part, part)) for part in used])


def spread(items: Sequence[int], limit: int, always: Sequence[int] = ()) -> list[int]:
    """At most `limit` of the items, evenly chosen, with those that must be among them."""
    if len(items) <= limit:
        return list(items)
    kept = [item for item in dict.fromkeys(always) if item in items][:limit]
    positions = np.linspace(0, len(items) - 1, max(1, limit - len(kept))).round().astype(int)
    return sorted({*kept, *(items[position] for position in positions)})[:limit]
