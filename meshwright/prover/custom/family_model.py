"""A model of a family without an independent reference, proven as a custom model: against its own module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from meshwright.base.config import RunConfig
from meshwright.base.models.registry import run_spec
from meshwright.core.models.init import build_model
from meshwright.core.parallel.tensor_parallel import family_parallel_spec
from meshwright.core.trainer.custom_model import CustomModel

REFERENCES = ("llama",)
"""The families that `prover/oracle/decoder.py` computes again."""


def has_reference(config: RunConfig) -> bool:
    """Whether the oracle computes the configured model again."""
    return config.model.family in REFERENCES and not config.lora.enabled


class FamilyModel(nn.Module):
    """Tokens and labels -> the sum of token losses, as a model that computes its loss itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None) -> dict[str, Tensor]:
        total, _ = self.model(tokens, labels, *([] if documents is None else [documents]))
        return {"loss": total}


def name_entries(samples: Sequence[Any]) -> dict[str, Any]:
    """The collate function: (tokens, labels), and the documents of packed ones, of every sample -> a batch by name."""
    columns = zip(("tokens", "labels", "documents"), zip(*samples, strict=True), strict=False)
    return {name: np.stack(column) for name, column in columns}


BALANCING = "the load-balancing loss and the routing bias of experts: the proof runs have neither"


def without_balancing(config: RunConfig) -> RunConfig:
    """The config of the proof runs: the module alone computes neither the load-balancing loss nor a routing bias."""
    if not config.model.experts:
        return config
    return replace(config, model=replace(config.model, router_aux_loss=0.0, router_bias_rate=0.0))


def family_custom_model(config: RunConfig) -> CustomModel:
    """The configured model with its initial weights."""
    module = FamilyModel(build_model(config.model, config.seed, lora=config.lora))
    spec = family_parallel_spec(run_spec(config)).under_objective()
    return CustomModel(module, None, spec, collate=name_entries, reduction="sum")
