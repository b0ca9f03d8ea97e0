"""The value of a named metric in a record of an evaluation. Torch-free."""

from __future__ import annotations

import math

from meshwright.base.records.events import Event
from meshwright.errors import ConfigError


def metric_value(record: Event, metric: str) -> float | None:
    """The loss or a metric of the user; None if it is not finite. Raises ConfigError if there is no such metric."""
    values = {"loss": record.get("loss"), **record.get("metrics", {})}
    if metric not in values:
        raise ConfigError(f"an evaluation has no metric {metric}", f"expected one of {', '.join(values)}")
    value = values[metric]
    return float(value) if value is not None and math.isfinite(value) else None


def is_better(value: float, best: float | None, mode: str, margin: float = 0.0) -> bool:
    """Whether a value is better than the best one by more than `margin`. `mode` is min or max."""
    if best is None:
        return True
    return value < best - margin if mode == "min" else value > best + margin
