"""Resolves the model that a command line names: a preset, a run file, or a Hugging Face config; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.config import PRESETS, ModelConfig, RunConfig
from meshwright.errors import ConfigError
from meshwright.models.architecture import Architecture
from meshwright.models.initial_model import load_run_config
from meshwright.models.registry import model_architecture
from meshwright.planner.workload.huggingface_config import HuggingFaceConfig, read_huggingface_config


@dataclass(frozen=True)
class ResolvedModel:
    """A model, and the settings with which Meshwright trains it."""

    architecture: Architecture
    """the model as the planner sees it"""
    run_config: RunConfig | None
    """the config of a preset or a run file; None for a Hugging Face config"""
    model_config: ModelConfig | None
    """the settings of Meshwright's decoder; None if it cannot train this model"""
    note: str = ""
    """why the decoder cannot train the model, or which features of it are ignored"""


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
    model_config, note = trainable_config(published)
    return ResolvedModel(published.architecture, None, model_config, note)


def resolve_run(config: RunConfig, name: str) -> ResolvedModel:
    config.require_built_in_model()
    return ResolvedModel(model_architecture(config.model, name), config, config.model)


def trainable_config(published: HuggingFaceConfig) -> tuple[ModelConfig | None, str]:
    """Returns the settings with which Meshwright's decoder is this model, and a note on the features that it ignores.

    If the decoder cannot train the model, returns None and the reason.
    """
    model = published.architecture
    if missing := unsupported_features(published):
        return None, f"Meshwright's decoder does not support {missing[0]}"
    try:
        config = ModelConfig(
            vocab=model.vocab,
            width=model.width,
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.kv_heads,
            ffn=model.expert_ffn or model.ffn,
            rope_theta=published.rope_theta,
            norm_eps=published.norm_eps,
            tie=model.tied_embeddings,
            experts=model.experts,
            experts_active=model.experts_active or ModelConfig.experts_active,
            experts_shared=model.experts_shared,
        )
    except ConfigError as error:
        return None, error.message
    window = (f"sliding-window attention of {model.sliding_window:,} tokens",) if model.sliding_window else ()
    return config, "; ".join(f"ignored: {feature}" for feature in (*published.ignored_features, *window))


def unsupported_features(published: HuggingFaceConfig) -> list[str]:
    """Lists the features of the model that Meshwright's decoder does not have, the most important first."""
    model = published.architecture
    features = {
        "multi-head latent attention (MLA)": model.latent_attention is not None,
        "learned position embeddings": model.learned_positions > 0,
        "LayerNorm": model.norm != "rms",
        "a feed-forward without a gate": not model.gated,
        "biases": model.bias or model.qkv_bias or model.out_bias or model.ffn_bias,
        "QK norm": model.qk_norm,
        f"head_dim = {model.head_dim} with width {model.width} and {model.heads} heads": (
            model.head_dim * model.heads != model.width
        ),
        "parallel residual blocks": model.parallel_residual,
        "dense layers before MoE layers": model.dense_layers > 0,
        "a gate on shared experts": model.shared_expert_gate,
        f"activation {published.activation!r}": published.activation != "silu",
    }
    return [feature for feature, present in features.items() if present]
