"""The model families by name, and the spec of a configured model. Torch-free.

A family is a folder with `spec.py` (`OPTIONS`, the dataclass of its own settings, and `declare`) and `model.py`
(`build`), which imports torch.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from meshwright.config import ModelConfig, RunConfig
from meshwright.config.reader import build_dataclass
from meshwright.errors import ConfigError
from meshwright.models.architecture import Architecture
from meshwright.models.spec import ModelSpec

FAMILIES = {
    "llama": "meshwright.models.llama",
    "gemma2": "meshwright.models.gemma2",
}


@lru_cache(maxsize=64)
def model_spec(config: ModelConfig) -> ModelSpec:
    """The spec of the configured model. Raises ConfigError for an unknown family or option."""
    spec = import_module(f"{family_package(config)}.spec").declare(config, family_options(config))
    assert isinstance(spec, ModelSpec)
    return spec


def validate_family(config: RunConfig) -> None:
    """Raises ConfigError if the family cannot be trained on the layout of the config."""
    seam = model_spec(config.model).attention
    if config.layout.context > 1 and config.context.method == "ring" and not seam.is_plain:
        raise ConfigError(
            f"context.method = ring computes plain attention, and that of the family {config.model.family} is not",
            "try context.method = all-to-all",
        )


def block_costs(config: RunConfig) -> tuple[float, ...]:
    """FLOPs per sample of every block of the configured model, by which pipeline stages are balanced."""
    return model_spec(config.model).block_costs(config.data.sequence)


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
