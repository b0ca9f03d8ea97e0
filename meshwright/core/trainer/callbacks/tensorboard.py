"""Writes the scalars of a run for TensorBoard. Torch-free until a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.core.trainer.callbacks.callback import RunContext
from meshwright.core.trainer.callbacks.tracker import Tracker


class TensorBoard(Tracker):
    """Event files in `tensorboard/` of the run folder, or in `folder`. Steps that a restart repeats replace their
    earlier records.
    """

    def __init__(self, folder: str | Path | None = None, every: int = 10) -> None:
        super().__init__(every)
        self.folder = folder

    def open(self, run: RunContext, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self.folder) if self.folder is not None else run.path / "tensorboard"
        restarted = run.attempt > 1
        self.writer = SummaryWriter(str(folder), purge_step=run.first_step if restarted else None)
        if not restarted:
            table = "\n".join(["| setting | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in settings.items())])
            self.writer.add_text("settings", table)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, _run: RunContext) -> None:
        self.writer.close()
