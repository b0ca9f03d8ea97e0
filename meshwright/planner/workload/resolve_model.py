"""Resolves the model that a command line names: a preset, a run file, or a Hugging Face config; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.config import PRESETS, ModelConfig, RunConfig
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.initial_model import load_run_config
from meshwright.base.models.registry import model_architecture
from meshwright.errors import ConfigError
from meshwright.planner.workload.huggingface_config import read_huggingface_config


@dataclass(frozen=True)
class ResolvedModel:
    """A model, and the settings with which Meshwright trains it."""

    architecture: Architecture
    """the model as the planner sees it"""
    run_config: RunConfig | None
    """the config of a preset or a run file; None for a Hugging Face config"""
    model_config: ModelConfig | None
    """the settings of the model's family; None if no family computes this model"""
    note: str = ""
    """why no family computes the model, and features of it that the planner ignores"""


def resolve_model(name: str, overrides: Sequence[str] = ()) -> ResolvedModel:
    """Returns the model that `name` means; `overrides` are `--KEY=VALUE` options for a preset or a run file."""
    if name in PRESETS:
        return resolve_run(load_run_config(None, [f"--preset={name}", *overrides]), name)
    path = Path(name)
    if not name or not path.exists():
        raise ConfigError(
            f"model {name!r} is neither a preset nor a file",
            f"expected {', '.join(PRESETS)}, a run file (.toml), a Hugging Face config.json or its folder",
        )
    if path.suffix == ".toml":
        return resolve_run(load_run_config(path, overrides), path.stem)
    if overrides:
        raise ConfigError(
            f"{overrides[0]} is a setting of a run, but {path} is a Hugging Face config",
            "try it with a preset or a run file",
        )
    published = read_huggingface_config(path)
    return ResolvedModel(published.architecture, None, published.model_config, "; ".join(published.notes))


def resolve_run(config: RunConfig, name: str) -> ResolvedModel:
    config.require_built_in_model()
    return ResolvedModel(model_architecture(config.model, name), config, config.model)
