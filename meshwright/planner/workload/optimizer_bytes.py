"""Bytes of optimizer state and the trainable part of a model, as optimizers and groups declare them; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from meshwright.base.config import LoraConfig, ModelConfig, OptimizerConfig, RunConfig
from meshwright.base.models.registry import frozen_spec
from meshwright.base.models.spec import ParameterSpec
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.optimizer_state import OUTSIDE_BLOCKS, state_tensors, update_rule
from meshwright.planner.workload.trainer_profile import TrainerProfile


def optimizer_bytes(trainer: TrainerProfile, config: RunConfig | None, model: object) -> float:
    """Mean bytes of optimizer state and master weights per parameter of a Meshwright run in float32; another trainer's
    are in its profile. `model` is a traced model, or that of the config.
    """
    if config is None:
        return trainer.optimizer_bytes + trainer.master_bytes
    masters = trainer.master_bytes * trainable_fraction(config, model) if trainer.master_bytes else 0.0
    if isinstance(model, TracedModel):
        return mean_bytes(config.optimizer, model.spec.parameters) + masters
    return mean_bytes_of_family(config.optimizer, config.model, config.lora) + masters


def trainable_fraction(config: RunConfig | None, model: object) -> float:
    """The part of the parameters that has gradients: less than 1 under low-rank adaptation and with frozen groups."""
    if config is None:
        return 1.0
    if isinstance(model, TracedModel):
        return trainable_part(model.spec.parameters)
    return trainable_fraction_of_family(config.optimizer, config.model, config.lora)


@lru_cache(maxsize=64)
def trainable_fraction_of_family(config: OptimizerConfig, model: ModelConfig, lora: LoraConfig) -> float:
    return trainable_part(frozen_spec(model, lora, config).parameters)


def trainable_part(parameters: Sequence[ParameterSpec]) -> float:
    trainable = sum(parameter.local_numel() for parameter in parameters if parameter.trainable)
    return trainable / sum(parameter.local_numel() for parameter in parameters)


@lru_cache(maxsize=64)
def mean_bytes_of_family(config: OptimizerConfig, model: ModelConfig, lora: LoraConfig) -> float:
    return mean_bytes(config, frozen_spec(model, lora, config).parameters)


def mean_bytes(config: OptimizerConfig, parameters: Sequence[ParameterSpec]) -> float:
    """Mean bytes per parameter, without the numbers that an optimizer keeps for each tensor."""
    total = 0
    for parameter in parameters:
        rule = update_rule(config, parameter.name, parameter.shape, parameter.unit not in OUTSIDE_BLOCKS)
        if parameter.trainable:
            tensors = state_tensors(config, rule, parameter.shape)
            total += sum(tensor.nbytes(parameter.shape, 4) for tensor in tensors if tensor.dims)
    return total / sum(parameter.local_numel() for parameter in parameters)
