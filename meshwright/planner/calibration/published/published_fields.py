"""Parses the layout, the precision and the activation checkpointing of a published run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from meshwright.base.config.reader import shorten
from meshwright.base.models.architecture import Architecture
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.planner.calibration.published.published_records import parse_count

STAGES: tuple[tuple[str, str], ...] = (
    (r"zero(?:dp|stage)?3|^parameters", "parameters"),
    (r"zero(?:dp|stage)?2|shardgradop", "gradients"),
    (r"zero(?:dp|stage)?1|dist(?:ributed)?opt|zeroredundancy", "optimizer"),
    (r"zero(?:dp|stage)?0|^none|^no$|not?shard|ddp$|^replicate", "none"),
    (r"(?:no|not|without)reshard|reshard(?:afterforward)?(?:false|off|0)", "gradients"),
)
PARTS: tuple[tuple[str, str], ...] = (
    (r"^gradients", "gradients"),
    (r"^optimizer|^(?:(?!param|weight|grad).)*optim\w*shard", "optimizer"),
    (r"fully?shard|hybridshard|hsdp|fsdp", "parameters"),
)
"""A pattern in the letters and digits of a run's name of its sharding -> what is sharded; the first match counts: a
stage of ZeRO, then optimizer state and gradients that are listed together, then one part. FSDP shards parameters unless
another part is said."""
OPTIMIZER = r"optim\w*(?:[ -](?:states?|shard\w*|partition\w*))*"
GRADIENTS = r"grad\w*(?:[ -](?:shard|partition)\w*)*\b(?!\W+(?:accum|check|clip|compress))"
AND = r"\s*(?:,\s*and\b|\band\b|[-+,&/])\s*"
LISTED = re.compile(f"{OPTIMIZER}{AND}{GRADIENTS}|{GRADIENTS}{AND}{OPTIMIZER}")
"""Text that lists optimizer state and gradients."""
WHOLE = re.compile(
    r"(?:\bnot?|without|replicat\w+)\W+(?:param|weight)|(?:param|weight)\w*\W+(?:are\W+)?(?:not|replicat)"
)
"""Text that says that parameters are not sharded."""
PRECISIONS: tuple[tuple[str, str], ...] = (
    (r"fp4|float4|e2m1", "fp4"),
    (r"fp8|float8|e4m3", "fp8"),
    (r"bf16|bfloat16", "bf16"),
    (r"fp16|float16|\bhalf\b", "fp16"),
    (r"fp32|\bfloat32", "fp32"),
)
"""A pattern in a run's name of its precision -> precision; the first match counts."""
UNSTATED_PRECISION = "fp16"
NEGATED_PRECISION = re.compile(r"\b(?:no|not|non|without)[ -](?:using )?\w+")
CHECKPOINTING: tuple[tuple[str, str], ...] = (
    (r"^selective layer\b", "alternate"),  # every other block
    (r"^(?:none|no|not|off|false|disabled|without)\b", "none"),
    (r"^(?:full|true|yes|on|all|uniform|enabled)\b", "full"),
    (r"^(?:selective|core attention|attention)\b", "selective"),
)
"""How a run's name of its activation checkpointing begins -> mode; the first match counts."""
DEGREES = ("dp", "tp", "pp", "cp", "ep")
MAX_DEGREE = 1 << 24
ADAPTERS = re.compile(r"\b(?:q?lora|dora|peft|adapter[- ](?:tun|fine|train|only)\w*)\b", re.IGNORECASE)
"""Names of fine-tuning that trains adapters and not all parameters."""
NO_ADAPTERS = re.compile(
    r"\b(?:no|not|non|without)(?: using| with| any)?[ -](?:q?lora|dora|peft|adapter)\w*", re.IGNORECASE
)
"""Text that says that a run does not do so."""


def refuse_adapters(row: dict[str, Any]) -> None:
    """Raises ConfigError if a run trains adapters only, whose FLOPs and memory are not those of the model."""
    fields = [row.get(key) for key in ("id", "source", "notes", "software", "trainer", "framework")]
    fields.append(row["model"].get("name"))
    text = NO_ADAPTERS.sub("", " ".join(str(field) for field in fields if field).replace("_", " "))
    if match := ADAPTERS.search(text):
        raise ConfigError(f"it trains adapters only ({match[0]})", "expected a run that trains all parameters")


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
        axis: parse_count(stated, axis, maximum=MAX_DEGREE) for axis in DEGREES if stated.get(axis) is not None
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


def validate_degrees(degrees: Degrees, model: Architecture, sequence: int) -> None:
    """Raises ConfigError if the sizes of a model do not divide into its degrees."""
    if model.heads % degrees.tensor:
        raise ConfigError(f"tp = {degrees.tensor} does not divide heads = {model.heads}")
    if degrees.tensor > min(model.width, model.ffn, model.vocab):
        raise ConfigError(f"tp = {degrees.tensor} is more than hidden, ffn or vocab")
    if model.experts and model.experts % degrees.expert:
        raise ConfigError(f"ep = {degrees.expert} does not divide experts = {model.experts}")
    if degrees.expert > 1 and not model.experts:
        raise ConfigError(f"ep = {degrees.expert}, and the model has no experts")
    if sequence % degrees.context:
        raise ConfigError(f"cp = {degrees.context} does not divide seq = {sequence}")


@dataclass(frozen=True)
class Sharding:
    """What a run shards over data-parallel ranks, and over how many of them."""

    kind: str | None
    """none, optimizer, gradients or parameters; None if the run does not state it"""
    text: str
    assumptions: tuple[str, ...] = ()


def parse_sharding(stated: dict[str, Any]) -> Sharding:
    """Returns the sharding that a run states; a degree of FSDP says that parameters are sharded."""
    text = str(stated.get("sharding") or "")
    letters = re.sub(r"[^a-z0-9]", "", text.lower())
    kind = first_match(STAGES, letters) or listed_parts(text.lower()) or first_match(PARTS, letters)
    if kind is None and stated.get("fsdp_degree") not in (None, 1):
        kind = "parameters"
    unknown = (f"sharding {shorten(text)!r}, which the planner does not know, as if it were not stated",)
    return Sharding(kind, letters, unknown if text and kind is None else ())


def first_match(patterns: tuple[tuple[str, str], ...], text: str) -> str | None:
    return next((kind for pattern, kind in patterns if re.search(pattern, text)), None)


def listed_parts(text: str) -> str | None:
    """Returns what is sharded if a text lists optimizer state and gradients, with parameters or without them."""
    if not LISTED.search(text):
        return None
    return "parameters" if re.search("param|weight", text) and not WHOLE.search(text) else "gradients"


def parse_fsdp_degree(
    stated: dict[str, Any], sharding: Sharding, degrees: Degrees, devices_per_node: int
) -> tuple[int, tuple[str, ...]]:
    """Returns the number of data-parallel ranks that share the shards, and what is assumed. Hybrid sharding without a
    degree shards over the data-parallel ranks of a node.
    """
    data = degrees.data
    if stated.get("fsdp_degree"):
        degree = parse_count(stated, "fsdp_degree", maximum=data)
        if data % degree:
            raise ConfigError(f"fsdp_degree = {degree} does not divide dp = {data}")
        return degree, ()
    if not re.search("hsdp|hybrid", sharding.text):
        return data, ()
    degree = gcd(data, max(1, devices_per_node // (degrees.tensor * degrees.context)))
    return degree, (f"shards over {degree} data-parallel ranks, those of a node, which the run does not state",)


def parse_activation_checkpoint(stated: Any) -> str | None:
    """Returns the mode of activation checkpointing that a run states; None if it states none that is known."""
    words = " ".join(re.findall(r"[a-z0-9]+", str(stated).lower())) if stated is not None else ""
    return first_match(CHECKPOINTING, words)


def parse_precision(stated: str | None) -> str:
    """Returns the precision of a run's matmuls."""
    if stated is None:
        return UNSTATED_PRECISION
    text = NEGATED_PRECISION.sub("", stated.lower())
    precision = first_match(PRECISIONS, text)
    if precision is None:
        names = ", ".join(name for _, name in PRECISIONS)
        raise ConfigError(f"precision {shorten(stated)!r} is unknown", f"expected one of {names}")
    return precision
