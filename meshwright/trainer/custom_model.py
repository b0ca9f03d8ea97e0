"""What a user brings to train in place of a built-in model: a module, its loss, its batches, and its parallelism."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.data.batch_structure import BatchStructure, CountRule
from meshwright.data.loader import TOKENS_AND_LABELS
from meshwright.data.source import Collate
from meshwright.parallel.parallel_spec import ParallelSpec
from meshwright.parallel.sync_batch_norm import synchronize_batch_norm
from meshwright.trainer.objective import LossFunction, Metric, Objective, Reduction, shifts_labels

CodeRecord = dict[str, Any]
"""The code of a custom model, as identity.json records it: class, fingerprint, python, parts and structure."""


@dataclass(frozen=True)
class CustomModel:
    """A user's model. Ranks that are forked share its modules, so each rank trains a copy of them."""

    module: nn.Module
    loss: LossFunction | None
    """None: the model computes its loss itself"""
    spec: ParallelSpec
    """how the model is parallelized"""
    batch: BatchStructure = TOKENS_AND_LABELS
    """the entries of a batch, and how its valid targets are counted"""
    collate: Collate | None = None
    """makes a batch of a list of samples; None: samples are stacked"""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """name -> function of (outputs, target or batch) that returns (sum, count)"""
    reduction: Reduction | None = None
    """what the loss returns; None: a sum, or what a model that computes its loss itself is known to return"""
    loss_names: tuple[str, ...] = ()
    """names of the sums, where the loss returns a dict of them"""
    code: CodeRecord | None = None
    """the fingerprints of the model, the loss and the functions beside them"""
    unit: str = "targets"
    """what a valid target is called on the terminal and in reports: tokens, samples or targets"""
    notes: tuple[str, ...] = ()
    """what the check of the first batch found, one line each"""

    def __post_init__(self) -> None:
        count = self.batch.count
        if self.loss is None and count is not None and count.kind == "valid" and shifts_labels(self.module):
            object.__setattr__(self, "batch", self.batch.with_count(CountRule("shifted", count.entry)))

    def modules(self) -> list[nn.Module]:
        """Returns the modules that may have parameters: the model, and the loss if it is a module."""
        return [module for module in (self.module, self.loss) if isinstance(module, nn.Module)]

    def build_objective(self, device: torch.device, dtype: torch.dtype) -> Objective:
        """Returns a copy of model and loss as one module on a device."""
        module = copy.deepcopy(self.module)
        loss = copy.deepcopy(self.loss) if isinstance(self.loss, nn.Module) else self.loss
        synchronize_batch_norm(module)
        disable_caches(module)
        return Objective(
            module.to(device, dtype),
            loss,
            self.batch,
            reduction=self.reduction,
            metrics=self.metrics,
            loss_names=self.loss_names,
        ).to(device)

    def objective_spec(self) -> ParallelSpec:
        """Returns the spec of the module that `build_objective` returns."""
        return self.spec.under_objective()


def disable_caches(module: nn.Module) -> None:
    """Turns off the caches for generation in models of transformers: recomputation would add the same keys again."""
    for submodule in module.modules():
        if getattr(getattr(submodule, "config", None), "use_cache", False):
            submodule.config.use_cache = False  # type: ignore[union-attr]
