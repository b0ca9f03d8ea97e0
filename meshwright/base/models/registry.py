"""The model families by name, and the spec of a configured model. Torch-free.

A family is a folder with `spec.py` (`OPTIONS`, the dataclass of its own settings, and `declare`) and `huggingface.py`
(how Hugging Face folders store it). The module of the same name in `meshwright.core.models` builds it (`build`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from meshwright.base.config import LoraConfig, ModelConfig, OptimizerConfig, RunConfig
from meshwright.base.config.reader import build_dataclass, format_value
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.config_fields import REQUIRED, ConfigFields
from meshwright.base.models.huggingface import StoredParameter
from meshwright.base.models.lora import with_lora
from meshwright.base.models.spec import ModelSpec
from meshwright.base.topology.parameter_groups import is_frozen, validate_groups
from meshwright.errors import ConfigError

FAMILIES = {
    "llama": "meshwright.base.models.llama",
    "gemma2": "meshwright.base.models.gemma2",
    "qwen2": "meshwright.base.models.qwen2",
    "qwen3": "meshwright.base.models.qwen3",
    "mistral": "meshwright.base.models.mistral",
    "mixtral": "meshwright.base.models.mixtral",
    "gpt2": "meshwright.base.models.gpt2",
    "deepseek_v2": "meshwright.base.models.deepseek_v2",
}


@lru_cache(maxsize=64)
def model_spec(config: ModelConfig) -> ModelSpec:
    """The spec of the configured model. Raises ConfigError for an unknown family or option."""
    spec = import_module(f"{family_package(config)}.spec").declare(config, family_options(config))
    assert isinstance(spec, ModelSpec)
    return spec


@lru_cache(maxsize=64)
def lora_spec(config: ModelConfig, lora: LoraConfig) -> ModelSpec:
    """The spec of the configured model with the factors of low-rank adaptation, if there are any."""
    spec = model_spec(config)
    return with_lora(spec, lora, stored_names(config)) if lora.enabled else spec


def stored_names(config: ModelConfig) -> list[StoredParameter]:
    """The names of Hugging Face folders; none where the form of the family lacks a part of the model."""
    try:
        return list(stored_parameters(config))
    except ConfigError:
        return []


@lru_cache(maxsize=64)
def frozen_spec(config: ModelConfig, lora: LoraConfig, optimizer: OptimizerConfig) -> ModelSpec:
    """The spec of what a run trains, in which the parameters of frozen groups are not trainable."""
    spec = lora_spec(config, lora)
    if not optimizer.groups:
        return spec
    validate_groups(optimizer, [parameter.name for parameter in spec.parameters if parameter.trainable])
    parameters = tuple(
        replace(parameter, trainable=parameter.trainable and not is_frozen(optimizer, parameter.name))
        for parameter in spec.parameters
    )
    return replace(spec, parameters=parameters)


def run_spec(config: RunConfig) -> ModelSpec:
    """The spec of what a run trains: the configured model, with its factors under low-rank adaptation, and without
    gradients for the parameters of frozen groups.
    """
    return frozen_spec(config.model, config.lora, config.optimizer)


def validate_family(config: RunConfig) -> None:
    """Raises ConfigError if the family cannot be trained on the layout of the config."""
    spec = run_spec(config)
    seam, positions = spec.attention, spec.architecture.learned_positions if spec.architecture else 0
    if positions and config.data.sequence > positions:
        raise ConfigError(
            f"data.sequence = {config.data.sequence} exceeds the {positions} positions of the family "
            f"{config.model.family}",
            f"expected at most {positions}, or a larger model.options.positions",
        )
    if any(source.kind == "chat" and source.packing for source in (config.data, *config.data.mixture)):
        validate_packing(config)
    if config.layout.context > 1 and config.context.method == "ring" and not seam.is_plain:
        raise ConfigError(
            f"context.method = ring computes plain attention, and that of the family {config.model.family} is not",
            "try context.method = all-to-all",
        )


def validate_packing(config: RunConfig) -> None:
    """Raises ConfigError if the family cannot be trained on samples of several chats."""
    architecture = run_spec(config).architecture
    if architecture is not None and architecture.learned_positions:
        raise ConfigError(
            f"data.packing = true: the family {config.model.family} has learned positions, which do not restart in a "
            "sample of several chats",
            "try data.packing = false",
        )


def block_costs(config: RunConfig) -> tuple[float, ...]:
    """FLOPs per sample of every block of the configured model, by which pipeline stages are balanced."""
    return run_spec(config).block_costs(config.data.sequence)


def model_architecture(config: ModelConfig, name: str) -> Architecture:
    """The sizes of the configured model, under the name that the planner shows."""
    architecture = model_spec(config).architecture
    assert architecture is not None
    return replace(architecture, name=name)


def family_package(config: ModelConfig) -> str:
    if config.family not in FAMILIES:
        raise ConfigError(f"model.family = {config.family} is unknown", f"expected one of {', '.join(FAMILIES)}")
    return FAMILIES[config.family]


def family_options(config: ModelConfig) -> Any:
    """The settings of the family itself, from `model.options`."""
    cls = import_module(f"{family_package(config)}.spec").OPTIONS
    if config.options and not fields(cls):
        raise ConfigError(
            f"model.options.{next(iter(config.options))} is set, and the family {config.family} has no options",
            "expected no table model.options",
        )
    return build_dataclass(cls, config.options, "model.options")


def read_huggingface_section(fields_of_file: ConfigFields) -> dict[str, Any]:
    """The keys of `model` that a config.json determines. Raises ConfigError for what no family computes."""
    family = fields_of_file.text("model_type", REQUIRED)
    if family not in FAMILIES:
        raise ConfigError(
            f"{fields_of_file.file}: model_type = {format_value(family)} is unknown",
            f"expected one of {', '.join(FAMILIES)}",
        )
    section = import_module(f"{FAMILIES[family]}.huggingface").read_config(fields_of_file)
    fields_of_file.require_all_read()
    return {**section, "family": family}


def read_huggingface_model(fields_of_file: ConfigFields) -> ModelConfig:
    """The model of a config.json, with the defaults of what the file does not determine."""
    config = build_dataclass(ModelConfig, read_huggingface_section(fields_of_file), "model")
    assert isinstance(config, ModelConfig)
    model_spec(config)
    return config


def write_huggingface_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of the configured model. Raises ConfigError if Hugging Face's form of the family lacks a part."""
    written = import_module(f"{family_package(config)}.huggingface").write_config(config, family_options(config))
    assert isinstance(written, dict)
    return written


def stored_parameters(config: ModelConfig) -> Iterator[StoredParameter]:
    """Where a Hugging Face folder stores the parameters of the configured model."""
    module = import_module(f"{family_package(config)}.huggingface")
    yield from module.stored_parameters(config, family_options(config))
