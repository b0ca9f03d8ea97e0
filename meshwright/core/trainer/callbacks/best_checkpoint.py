"""Keeps the checkpoint of the best evaluation. Torch-free."""

from __future__ import annotations

from typing import Literal

from meshwright.base.records.events import Event
from meshwright.core.trainer.callbacks.callback import Callback, RunContext
from meshwright.core.trainer.callbacks.metric import is_better, metric_value


class KeepBestCheckpoint(Callback):
    """Saves a checkpoint after every evaluation that is the best one so far, and keeps it until a better one is
    published. The newest checkpoints are kept besides.
    """

    def __init__(self, metric: str = "loss", mode: Literal["min", "max"] = "min") -> None:
        self.metric, self.mode = metric, mode
        self.best: float | None = None
        self.best_step: int | None = None
        """the number of completed steps of the best evaluation"""

    def on_start(self, _record: Event, run: RunContext) -> None:
        self.best = self.best_step = None
        published = set(run.checkpoints())
        for record in run.records("eval"):
            if record["step"] + 1 in published:
                self._compare(record)
        run.keep_checkpoints(frozenset(filter(None, [self.best_step])))

    def on_evaluate(self, record: Event, run: RunContext) -> None:
        if self._compare(record):
            assert self.best_step is not None
            run.keep_checkpoints(run.kept_checkpoints | {self.best_step})  # the earlier one until this one is published
            run.save_checkpoint()

    def on_checkpoint(self, record: Event, run: RunContext) -> None:
        if record["step"] == self.best_step:
            run.keep_checkpoints(frozenset([record["step"]]))

    def _compare(self, record: Event) -> bool:
        value = metric_value(record, self.metric)
        if value is None or not is_better(value, self.best, self.mode):
            return False
        self.best, self.best_step = value, record["step"] + 1
        return True
