"""Logs a run to Weights & Biases, online or offline. Imports wandb when a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from meshwright.core.trainer.callbacks.callback import RunContext
from meshwright.core.trainer.callbacks.tracker import Tracker


class WeightsAndBiases(Tracker):
    """One run of Weights & Biases for all attempts: its id is the id of the run. Offline files are in `wandb/` of the
    run folder; `wandb sync` uploads them.
    """

    def __init__(
        self, project: str = "meshwright", mode: Literal["offline", "online"] = "offline", every: int = 10
    ) -> None:
        super().__init__(every)
        self.project, self.mode = project, mode

    def open(self, run: RunContext, settings: Mapping[str, Any]) -> None:
        import wandb

        self.tracked = wandb.init(
            project=self.project,
            id=run.run_id,
            name=run.path.name,
            dir=run.path,
            mode=self.mode,
            resume="allow",
            config=dict(settings),
            # Signals belong to the run, and standard output to its logs.
            settings=wandb.Settings(console="off", quiet=True),
        )
        self.tracked.define_metric("*", step_metric="step")  # a restart repeats steps, and wandb's own only rises

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self.tracked.log({**scalars, "step": step})

    def close(self, _run: RunContext) -> None:
        self.tracked.finish()
