"""Parses the sizes of a published run's model, and says which of them have a default because the run omits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.base.models.architecture import Architecture, LatentAttention
from meshwright.errors import ConfigError
from meshwright.planner.calibration.published.published_records import (
    optional_count,
    parse_count,
    parse_flag,
    parse_measurement,
)

GPT2_VOCABULARY = 51200
"""GPT-2's vocabulary, padded."""
DEEPSEEK_ATTENTION = LatentAttention(1536, 512, 128, 64, 128)
"""DeepSeek-V3's sizes, the only published ones of MLA, for a run that states no more than that it uses MLA."""
ATTENTION: Mapping[str, str] = {
    "mla": "latent",
    "multi-head latent attention": "latent",
    "mqa": "one key and value head",
    "multi-query": "one key and value head",
    "gqa": "full",
    "grouped-query": "full",
    "mha": "full",
    "multi-head": "full",
    "full": "full",
    "causal": "full",
    "softmax": "full",
    "flash": "full",
}
"""How a run's name of its attention begins -> the attention."""
MAX_SIZE_RATIO = 4 / 3
"""The sizes of a model contradict its stated number of parameters if the numbers differ by more than this factor.
Published ones differ by a factor of up to 1.2: learned positions of long sequences are not among the sizes."""


@dataclass(frozen=True)
class ParsedModel:
    """The model of a run, and what was taken for the sizes that the run omits."""

    sizes: Architecture
    defaults: tuple[str, ...]


def parse_model(model: dict[str, Any]) -> ParsedModel:
    """Parses the sizes of a model. Raises ConfigError if they contradict each other."""
    defaults: list[str] = []
    width, heads = parse_count(model, "hidden", maximum=1 << 24), parse_count(model, "heads", maximum=1 << 20)
    latent, kv_heads = parse_attention(model, heads)
    if latent is not None:
        defaults.append("the latent attention of DeepSeek-V3")
    elif kv_heads is None:
        defaults.append("as many key and value heads as query heads")
    if model.get("head_dim") is None and latent is None and width % heads:
        raise ConfigError(f"heads = {heads} does not divide hidden = {width}", "expected head_dim, too")
    if model.get("vocab") is None:
        defaults.append(f"a vocabulary of {GPT2_VOCABULARY:,}")
    if model.get("tied") is None:
        defaults.append("a head that does not share the embedding")
    layers = parse_count(model, "layers", maximum=10_000)
    ffn, experts = optional_count(model, "ffn"), optional_count(model, "experts", 1 << 14)
    if not ffn and not experts:
        defaults.append("a feed-forward of 4 x hidden")
    sizes = Architecture(
        str(model.get("name") or ""),
        layers,
        width,
        heads,
        kv_heads or heads,
        parse_count(model, "head_dim", maximum=1 << 16) if model.get("head_dim") else max(1, width // heads),
        ffn or optional_count(model, "moe_ffn") or 4 * width,
        parse_count(model, "vocab", maximum=1 << 24) if model.get("vocab") is not None else GPT2_VOCABULARY,
        gated=True,
        tied_embeddings=parse_flag(model, "tied"),
        latent_attention=latent,
    )
    if experts:
        sizes, assumed = with_experts(sizes, model, experts, ffn)
        defaults += assumed
    elif stated := [key for key in ("topk", "moe_ffn", "shared_experts") if optional_count(model, key)]:
        raise ConfigError(f"it states {stated[0]!r} and no experts", "expected the number of experts, too")
    return with_stated_size(sizes, model, defaults)


def parse_attention(model: dict[str, Any], heads: int) -> tuple[LatentAttention | None, int | None]:
    """Returns the sizes of latent attention if the run has it, and the number of key and value heads if it is known."""
    text = str(model.get("attention") or "full").strip().lower()
    kind = next((kind for name, kind in ATTENTION.items() if text.startswith(name)), None)
    if kind is None:
        raise ConfigError(f"attention {text[:40]!r} is unknown", "expected MHA, GQA, MQA or MLA")
    kv_heads = parse_count(model, "kv_heads", maximum=heads) if model.get("kv_heads") else None
    if kv_heads is None and kind == "one key and value head":
        kv_heads = 1
    if kv_heads is not None and heads % kv_heads:
        raise ConfigError(f"kv_heads = {kv_heads} does not divide heads = {heads}")
    return (DEEPSEEK_ATTENTION if kind == "latent" else None), kv_heads


def with_experts(sizes: Architecture, model: dict[str, Any], experts: int, ffn: int) -> tuple[Architecture, list[str]]:
    """Returns a model with its experts. Without `moe_ffn`, `ffn` is the intermediate size of an expert, as in the
    configs of Mixtral and DBRX, unless dense layers have it.
    """
    defaults = []
    dense_layers, expert_ffn = optional_count(model, "dense_layers", sizes.layers), optional_count(model, "moe_ffn")
    if not expert_ffn:
        if not ffn or dense_layers:
            raise ConfigError("it does not state 'moe_ffn'", "expected the intermediate size of its experts")
        expert_ffn = ffn
        defaults.append("experts of the intermediate size ffn")
    with_them = replace(
        sizes,
        experts=experts,
        experts_active=parse_count(model, "topk", maximum=experts),
        shared_ffn=optional_count(model, "shared_experts", 1 << 10) * expert_ffn,
        expert_ffn=expert_ffn,
        dense_layers=dense_layers,
    )
    return with_them, defaults


def with_stated_size(sizes: Architecture, model: dict[str, Any], defaults: list[str]) -> ParsedModel:
    """Returns the model with its feed-forward, gated or not, which decides whether it has RMS norms and biases. If the
    run does not state that, the number of parameters that it states does.

    Raises ConfigError if neither that number nor its active part is that of the sizes.
    """
    stated = parse_measurement(model, "params_b") if model.get("params_b") is not None else None
    plain = replace(sizes, gated=False, norm="layer", bias=True)
    if model.get("gated") is not None:
        sizes = sizes if parse_flag(model, "gated") else plain
    elif stated is not None and size_ratio(plain, stated) < size_ratio(sizes, stated):
        sizes = plain
        defaults.append("a feed-forward that is not gated, with LayerNorm and biases")
    else:
        defaults.append("a gated feed-forward with RMS norms and without biases")
    said = tuple(f"{text}, which the run does not state" for text in defaults)
    if stated is not None and size_ratio(sizes, stated) > MAX_SIZE_RATIO:
        raise ConfigError(
            f"its sizes have {sizes.parameters / 1e9:,.3g} billion parameters, and params_b = {stated:,.4g}",
            "expected sizes of the stated number of parameters",
        )
    return ParsedModel(sizes, said)


def size_ratio(sizes: Architecture, billions: float) -> float:
    """The factor by which the parameters of a model and a stated number differ; of a model with experts, all of its
    parameters or those that a token uses, whichever the number is nearer to.
    """
    counts = {sizes.parameters, sizes.active_parameters}
    return min(max(count / (billions * 1e9), billions * 1e9 / count) for count in counts)
