"""What a step measures beside the loss, as sums and counts that travel with the loss in one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.core.trainer.objective import find_objective


class Measures(Protocol):
    """An `Objective` of a user's model, or what the head of a built-in model measures (`PolicyMeasures`)."""

    measured: list[Tensor]
    """what the forward passes have added since the last `pop_measured`"""

    @property
    def measured_length(self) -> int:
        """The length of the vector of sums and counts."""

    def pop_measured(self, device: torch.device) -> Tensor:
        """Returns the sums and counts since the last call; zeros where this rank computed no loss."""

    def measured_values(self, sums: Sequence[float], targets: int, where: str) -> dict[str, float]:
        """Returns sum / count of every name, of the sums over all ranks."""


def find_measures(module: nn.Module) -> Measures | None:
    """Returns what a rank's module measures; a pipeline rank without the head finds it too."""
    objective = find_objective(module)
    if objective is not None:
        return objective
    measures: Measures | None = getattr(module, "measures", None)
    return measures
