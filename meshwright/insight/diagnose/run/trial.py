"""A trial of a finding's change: measured before, predicted, and measured after. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

CAME_TRUE = 0.5
"""Share of the predicted gain that a trial must measure for the prediction to have come true."""


@dataclass(frozen=True)
class ChangeTrial:
    """The change of a finding, run for a few steps in a temporary folder beside the unchanged settings."""

    settings: tuple[str, ...]
    first_step: int
    """the step of the checkpoint that both sides start from; 0: their initial state"""
    steps: int
    changes_numbers: bool
    """whether the run itself can only adopt the settings with --fork"""
    before: float
    """measured seconds per step with the settings of the run"""
    predicted: float
    """predicted seconds per step after the change, on the scale of `before`"""
    after: float
    """measured seconds per step after the change"""

    @property
    def came_true(self) -> bool:
        return self.before - self.after >= CAME_TRUE * (self.before - self.predicted) > 0

    @property
    def sentence(self) -> str:
        verdict = "came true" if self.came_true else "did not come true"
        return (
            f"the prediction {verdict}: {self.before * 1e3:.1f} ms per step before, {self.predicted * 1e3:.1f} ms "
            f"predicted and {self.after * 1e3:.1f} ms measured with {', '.join(self.settings)}"
        )
