"""The model that a word on the command line means: a preset, a run file, or a published config; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.config import PRESETS, ModelConfig, RunConfig, load_config
from meshwright.errors import ConfigError
from meshwright.planner.workload.architecture import Architecture
from meshwright.planner.workload.huggingface_config import HuggingFaceConfig, read_huggingface_config


@dataclass(frozen=True)
class ResolvedModel:
    architecture: Architecture
    run_config: RunConfig | None
    """of a preset or a run file"""
    model_config: ModelConfig | None
    """what our own decoder trains of it; None: it cannot"""
    note: str = ""
    """why it cannot, or in what the trained model differs from the published one"""


def resolve_model(word: str, overrides: Sequence[str] = ()) -> ResolvedModel:
    """`overrides` are `--a.b=c` words for the run of a preset or a run file."""
    if word in PRESETS:
        return of_run(load_config(None, [f"--preset={word}", *overrides]), word)
    path = Path(word)
    if not word or not path.exists():
        raise ConfigError(
            f"no model {word!r}: neither a preset nor a file",
            f"allowed: {', '.join(PRESETS)}, a run file (.toml), a published config.json or its folder",
        )
    if path.suffix == ".toml":
        return of_run(load_config(path, overrides), path.stem)
    if overrides:
        raise ConfigError(f"{overrides[0]} is a setting of a run, and {path} is none", "allowed: with a run file")
    found = read_huggingface_config(path)
    model, reason = trainable_config(found)
    return ResolvedModel(found.architecture, None, model, reason)


def of_run(config: RunConfig, name: str) -> ResolvedModel:
    return ResolvedModel(Architecture.from_config(config.model, name), config, config.model)


def trainable_config(found: HuggingFaceConfig) -> tuple[ModelConfig | None, str]:
    """The settings with which our own decoder is this model, and what they leave out; or None, and why."""
    model = found.architecture
    if lacks := lacking(found):
        return None, f"our decoder has no {lacks[0]}"
    try:
        settings = ModelConfig(
            vocab=model.vocab,
            width=model.width,
            layers=model.layers,
            heads=model.heads,
            kv_heads=model.kv_heads,
            ffn=model.expert_ffn or model.ffn,
            rope_theta=found.rope_theta,
            norm_eps=found.norm_eps,
            tie=model.tied_embeddings,
            experts=model.experts,
            experts_active=model.experts_active or ModelConfig.experts_active,
            experts_shared=model.experts_shared,
        )
    except ConfigError as error:
        return None, error.message
    window = (f"attention looks back {model.sliding_window:,} tokens only",) if model.sliding_window else ()
    return settings, "; ".join(f"left out: {what}" for what in (*found.ignored_features, *window))


def lacking(found: HuggingFaceConfig) -> list[str]:
    """What the model has and our decoder does not, the weightiest first."""
    model = found.architecture
    has = {
        "latent attention (MLA)": model.latent_attention is not None,
        "learned positions": model.learned_positions > 0,
        "LayerNorm": model.norm != "rms",
        "feed-forward without a gate": not model.gated,
        "biases": model.bias or model.qkv_bias or model.out_bias or model.ffn_bias,
        "norms on queries and keys": model.qk_norm,
        f"heads of {model.head_dim} beside a width of {model.width} and {model.heads} heads": (
            model.head_dim * model.heads != model.width
        ),
        "attention and feed-forward side by side": model.parallel_residual,
        "dense layers before those with experts": model.dense_layers > 0,
        "gate on shared experts": model.shared_expert_gate,
        f"activation {found.activation!r}": found.activation != "silu",
    }
    return [what for what, true in has.items() if true]
