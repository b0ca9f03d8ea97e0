"""Parses the fields of a published run: sizes of the model, cluster, layout, precision and activation checkpointing.

A field that is not possible raises ValueError, which makes the record invalid. A field that is possible, but
contradicts another one or is unknown, raises ConfigError, which excludes the run and names the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from meshwright.config.reader import shorten
from meshwright.errors import ConfigError
from meshwright.models.architecture import Architecture, LatentAttention
from meshwright.planner.hardware.cluster import GB, NODE_TYPES, Cluster, preset_cluster
from meshwright.topology.layout import Layout

MAX_COUNT = 1 << 40
"""Limit on any count that a run states."""
MAX_STAGES = 256
"""Limit on the pipeline stages of a run, over all ranks: the published ones have up to 128."""
MAX_MICRO_BATCHES = 4096
"""Limit on the micro-batches of a step: the published ones have up to 560."""
SHARDING = {
    "none": "none",
    "ddp": "none",
    "zero0": "none",
    "zero1": "optimizer",
    "distopt": "optimizer",
    "distributedoptimizer": "optimizer",
    "zero2": "gradients",
    "zero3": "parameters",
    "fsdp": "parameters",
    "fsdp2": "parameters",
    "hsdp": "parameters",
}
"""A run's name of its sharding -> what is sharded."""
PRECISIONS = {"fp4": "fp4", "fp8": "fp8", "float8": "fp8", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
"""Text in a run's name of its precision -> precision; the first match counts."""
DEEPSEEK_ATTENTION = LatentAttention(1536, 512, 128, 64, 128)
"""DeepSeek-V3's sizes, the only published ones of MLA, for a run that states no more than that it uses MLA."""
DEGREES = ("dp", "tp", "pp", "cp", "ep")
DEVICE_ALIASES = {
    "a100": "a100-80",
    "a800-80": "a800",
    "h100-80": "h100",
    "h800-80": "h800",
    "h20-96": "h20",
    "gh200-96": "gh200",
    "v100": "v100-32",
    "4090": "rtx4090",
    "h100-94": "h100-500w",
    "h100-96": "h100-500w",
    "h200-141": "h200",
}
"""A run's name of its GPU -> the planner's."""
NETWORKS: tuple[tuple[str, float, bool], ...] = (
    (r"inter-node (\d{1,6}) Gb/s", 1, False),
    (r"(?<!\d)(\d{1,6})x(?=\d{1,6}Gb )", 100, False),
    (r"(?<!\d)(\d{1,6}) ?Gbps node-node", 1, False),
    (r"(?<!\d)(\d{1,6}) ?Gb/s [\w-]{1,40} per GPU", 1, True),
    (r"bigscience()", 400, False),  # four adapters of 100 Gb/s per node, which its other records state
)
"""How runs state their network: a pattern for a number, the Gb/s of one unit, and whether it is per device or node."""
ADAPTERS = re.compile(r"\b(?:q?lora|dora|peft|adapter[- ](?:tun|fine|train|only)\w*)\b", re.IGNORECASE)
"""Names of fine-tuning that trains adapters and not all parameters."""
NO_ADAPTERS = re.compile(
    r"\b(?:no|not|non|without)(?: using| with| any)?[ -](?:q?lora|dora|peft|adapter)\w*", re.IGNORECASE
)
"""Text that says that a run does not do so."""


def parse_count(row: dict[str, Any], key: str, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
    """Returns an integer in a range, or raises ValueError."""
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise ValueError(f"{key} = {shorten(repr(value))} is not an integer")
    if not minimum <= value <= maximum:
        raise ValueError(f"{key} = {shorten(str(value))} is out of range, expected from {minimum:,} to {maximum:,}")
    return int(value)


def optional_count(row: dict[str, Any], key: str, maximum: int = 1 << 24) -> int:
    """Returns an integer of at least 0, or 0 if it is not stated; raises ValueError for anything else."""
    return parse_count(row, key, 0, maximum) if row.get(key) is not None else 0


def parse_flag(row: dict[str, Any], key: str, unstated: bool = False) -> bool:
    """Returns whether a field is true, or `unstated` if it is not stated; raises ValueError for anything else."""
    value = row.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} = {shorten(repr(value))} is neither true nor false")
    return unstated if value is None else value


def parse_measurement(value: Any) -> float:
    """Returns a number in the range of possible measurements, or raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-6 <= value <= 1e12:
        raise ValueError(f"{shorten(repr(value))} is not a possible measurement")
    return float(value)


def refuse_adapters(row: dict[str, Any]) -> None:
    """Raises ConfigError if a run trains adapters only, whose FLOPs and memory are not those of the model."""
    fields = [row.get(key) for key in ("id", "source", "notes", "software", "trainer", "framework")]
    fields.append(row["model"].get("name"))
    text = NO_ADAPTERS.sub("", " ".join(str(field) for field in fields if field).replace("_", " "))
    if match := ADAPTERS.search(text):
        raise ConfigError(f"it trains adapters only ({match[0]})", "expected a run that trains all parameters")


def parse_model(model: dict[str, Any]) -> Architecture:
    """Parses the sizes of a model."""
    width, heads = parse_count(model, "hidden", maximum=1 << 24), parse_count(model, "heads", maximum=1 << 20)
    vocab = model.get("vocab")
    if vocab is None:
        vocab = 51200  # GPT-2's vocabulary, padded
    experts = parse_count(model, "experts", maximum=1 << 14) if model.get("experts") else 0
    ffn = parse_count(model, "ffn", maximum=1 << 24) if model.get("ffn") else (0 if experts else 4 * width)
    gated = parse_flag(model, "gated", unstated=True)
    return Architecture(
        str(model.get("name", "")),
        parse_count(model, "layers", maximum=10_000),
        width,
        heads,
        parse_count(model, "kv_heads", maximum=heads) if model.get("kv_heads") else heads,
        parse_count(model, "head_dim", maximum=1 << 16) if model.get("head_dim") else max(1, width // heads),
        ffn or optional_count(model, "moe_ffn") or 4 * width,
        parse_count({"vocab": vocab}, "vocab", maximum=1 << 24),
        gated=gated,
        tied_embeddings=parse_flag(model, "tied"),
        norm="rms" if gated else "layer",
        bias=not gated,
        experts=experts,
        experts_active=optional_count(model, "topk", experts),
        shared_ffn=optional_count(model, "shared_experts") * optional_count(model, "moe_ffn"),
        expert_ffn=optional_count(model, "moe_ffn"),
        dense_layers=optional_count(model, "dense_layers"),
        latent_attention=DEEPSEEK_ATTENTION if model.get("attention") == "MLA" else None,
    )


def default_sizes(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns the sizes and the precision that a run does not state, each with the value that is taken for it."""
    model = row["model"]
    defaults = {
        "gated": "a gated feed-forward with RMS norms and without biases",
        "vocab": "a vocabulary of 51,200",
        "kv_heads": "as many key and value heads as query heads",
        "ffn": "" if model.get("experts") else "a feed-forward of 4 x hidden",
    }
    unstated = [text for key, text in defaults.items() if model.get(key) is None and text]
    if row.get("precision") is None:
        unstated.append("fp16")
    return tuple(f"{text}, which the run does not state" for text in unstated)


@dataclass(frozen=True)
class Degrees:
    """The degrees of a run, whose product is its number of devices."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    derived: tuple[str, ...]
    """what follows from other fields"""

    def layout(self, shard: int) -> Layout:
        """The layout whose shard groups have so many ranks."""
        return Layout(self.pipeline, self.data // shard, shard, self.context, self.tensor, self.expert)


def parse_degrees(stated: dict[str, Any], devices: int, is_sharded: bool) -> Degrees:
    """Parses the degrees of a run; a missing data-parallel degree follows from the number of devices.

    Without any degree, a run that shards its parameters or optimizer state (`is_sharded`) is data parallel only.
    """
    degrees = {
        axis: parse_count(stated, axis, maximum=1 << 24) for axis in DEGREES if stated.get(axis) is not None
    }  # fmt: skip
    if not degrees and not is_sharded and devices > 1:
        raise ConfigError("it states no layout", "expected degrees of parallelism, or a sharding")
    data, tensor, pipeline, context, expert = (degrees.get(axis) for axis in DEGREES)
    others = prod((tensor or 1, pipeline or 1, context or 1))
    derived: tuple[str, ...] = ()
    if data is None:
        if devices % others:
            raise ConfigError(
                f"gpus = {devices} is not a multiple of tp x pp x cp = {others}", "expected degrees that divide gpus"
            )
        data = devices // others
        derived = (f"dp = {data}, derived from gpus / (tp x pp x cp)",) if devices > 1 else ()
    if data * others != devices:
        raise ConfigError(
            f"dp x tp x pp x cp = {data * others} is not gpus = {devices}", "expected degrees whose product is gpus"
        )
    if expert and data * (context or 1) * (tensor or 1) % expert:
        raise ConfigError(f"ep = {expert} does not divide dp x cp x tp", "expected an expert degree inside a stage")
    return Degrees(data, tensor or 1, pipeline or 1, context or 1, expert or 1, derived)


def parse_activation_checkpoint(stated: Any) -> str | None:
    """Returns the mode of activation checkpointing that a run states; None if it states none that is known."""
    words = str(stated).lower().split() if stated is not None else []
    if words[:2] == ["selective", "layer"]:  # every other block
        return "alternate"
    return words[0] if words and words[0] in ("none", "full", "selective") else None


def parse_sharding(stated: Any) -> str | None:
    """Returns the sharding that a run states; None if it states none that is known."""
    return SHARDING.get(re.sub(r"[^a-z0-9]", "", str(stated).lower())) if stated is not None else None


def parse_precision(stated: Any) -> str:
    """Returns the precision that a run states, or fp16."""
    if stated is None:
        return "fp16"
    precision = next((precision for text, precision in PRECISIONS.items() if text in str(stated).lower()), None)
    if precision is None:
        raise ConfigError(f"precision {str(stated)[:20]!r} is unknown", f"expected one of {', '.join(PRECISIONS)}")
    return precision


def parse_cluster(gpu: str, devices: int, text: str) -> Cluster:
    """Returns the cluster of a run; `text` may state its network."""
    word = re.sub(r"nvidia[ -]|-?sxm\d?|-?hbm\w*|gb\b", "", gpu.lower()).strip().split(" ")[0]
    name = "h100-500w" if "500w" in gpu.lower() else DEVICE_ALIASES.get(word, word)
    if name not in NODE_TYPES:
        raise ConfigError(f"device {gpu!r} is unknown", f"expected one of {', '.join(NODE_TYPES)}")
    cluster = preset_cluster(name, devices)
    for pattern, gigabits, per_device in NETWORKS:
        if match := re.search(pattern, text):
            divisor = 1 if per_device else NODE_TYPES[name].devices
            bandwidth = parse_measurement(float(match[1] or 1)) * gigabits / 8 * GB / divisor
            return replace(cluster, inter_node=replace(cluster.inter_node, bandwidth=bandwidth))
    return cluster
