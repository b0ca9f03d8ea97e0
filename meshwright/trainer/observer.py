"""What the training loop shows to an observer on every rank; `prove` observes runs in this way."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.data.loader import MicroBatch
    from meshwright.trainer.loop import Training
    from meshwright.trainer.step import StepOutcome


class TrainingObserver:
    """Is called by the loop of every rank and may not change anything. This one ignores every call."""

    def on_start(self, training: Training) -> None:
        """The state is initialized or restored; no step of this attempt has run."""

    def on_gradient(self, step: int, batches: list[MicroBatch]) -> None:
        """The parameters have the gradients of a step, summed over ranks and times the loss scale."""

    def on_step(self, outcome: StepOutcome) -> None:
        """A step is complete."""

    def on_evaluation(self, step: int, loss: float, tokens: int) -> None:
        """An evaluation after a step is complete."""

    def on_finish(self) -> None:
        """The last step is complete and its checkpoint is saved."""
