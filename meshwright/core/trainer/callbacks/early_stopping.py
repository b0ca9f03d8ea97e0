"""Stops a run when its evaluations do not improve any more. Torch-free."""

from __future__ import annotations

from typing import Literal

from meshwright.base.records.events import Event
from meshwright.core.trainer.callbacks.callback import Callback, RunContext
from meshwright.core.trainer.callbacks.metric import is_better, metric_value


class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row that are not better than the best one by more than `margin`.

    The decision depends on the records of the evaluations alone, so a restart makes the same one.
    """

    def __init__(
        self, patience: int, metric: str = "loss", mode: Literal["min", "max"] = "min", margin: float = 0.0
    ) -> None:
        self.patience, self.metric, self.mode, self.margin = patience, metric, mode, margin
        self.best: float | None = None
        self.without_improvement = 0

    def on_start(self, _record: Event, run: RunContext) -> None:
        self.best, self.without_improvement = None, 0
        for record in run.records("eval"):
            self.on_evaluate(record, run)

    def on_evaluate(self, record: Event, run: RunContext) -> None:
        value = metric_value(record, self.metric)
        if value is not None and is_better(value, self.best, self.mode, self.margin):
            self.best, self.without_improvement = value, 0
            return
        self.without_improvement += 1
        if self.without_improvement >= self.patience:
            best = "no finite value" if self.best is None else f"the best is {self.best:.6g}"
            run.stop(f"{self.metric} has not improved in {self.patience} evaluations; {best}")
