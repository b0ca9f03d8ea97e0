"""What a user brings to train in place of a built-in model: a module, its loss, and how it is parallelized."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.parallel.parallel_spec import ParallelSpec
from meshwright.parallel.sync_batch_norm import synchronize_batch_norm
from meshwright.trainer.objective import LossFunction, Objective


@dataclass(frozen=True)
class CustomModel:
    """A user's model. Ranks that are forked share its modules, so each rank trains a copy of them."""

    module: nn.Module
    loss: LossFunction
    spec: ParallelSpec
    """how the model is parallelized"""

    def modules(self) -> list[nn.Module]:
        """Returns the modules that may have parameters: the model, and the loss if it is a module."""
        return [module for module in (self.module, self.loss) if isinstance(module, nn.Module)]

    def build_objective(self, device: torch.device, dtype: torch.dtype) -> Objective:
        """Returns a copy of model and loss as one module on a device."""
        module = copy.deepcopy(self.module)
        loss = copy.deepcopy(self.loss) if isinstance(self.loss, nn.Module) else self.loss
        synchronize_batch_norm(module)
        return Objective(module.to(device, dtype), loss).to(device)

    def objective_spec(self) -> ParallelSpec:
        """Returns the spec of the module that `build_objective` returns."""
        return self.spec.under_objective()
