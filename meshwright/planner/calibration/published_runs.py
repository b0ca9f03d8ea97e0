"""Published runs as jobs: a record of a training run that somebody measured, in the words of the planner.

A record is a stranger's: it is checked field by field; what it does not state is assumed, and the assumption is said.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.config import Batch
from meshwright.errors import ConfigError
from meshwright.io import read_regular_file
from meshwright.planner.hardware.cluster import GB, NODE_TYPES, Cluster, preset_cluster
from meshwright.planner.workload.architecture import Architecture, LatentAttention
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.trainer_profiles import profile_for_run
from meshwright.topology.layout import Layout

MOST_RECORDS = 5_000
LARGEST = 16 << 20
"""Bytes of a file of records."""
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
PRECISIONS = {"fp4": "fp4", "fp8": "fp8", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
"""By what a record's word has in it; the first that is found."""
DEEPSEEK = LatentAttention(1536, 512, 128, 64, 128)
"""The only published sizes of attention through compressed keys, where a record only says that it is."""


@dataclass(frozen=True)
class PublishedRun:
    """A run that was measured, and the job that it was."""

    name: str
    source: str
    job: PlannedJob
    seconds: float | None
    memory: float | None
    """bytes, of the kind that `counted` says"""
    memory_kind: str
    """reserved (the allocator's peak) or total (what the device shows)"""
    out_of_memory: bool
    flagged: bool
    assumptions: tuple[str, ...]
    """what the record does not say"""

    @property
    def fully_stated(self) -> bool:
        """Whether it says what it recomputes and how large a micro-batch is. Of vocabulary, half precision and sharding
        those of its software are taken where it is silent, as vTrain's are.
        """
        return not self.flagged and not self.assumptions


def read_published_runs(path: Path) -> tuple[list[PublishedRun], dict[str, str]]:
    """Those of a file that describe a decoder on devices that are known; and, by name, why the others are left out."""
    text = read_regular_file(path, LARGEST, f"file of records {path}", "a JSON list of runs")
    try:
        rows = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no file of records: {error}", "allowed: a JSON list of runs") from None
    if not isinstance(rows, list) or len(rows) > MOST_RECORDS:
        raise ConfigError(f"{path} holds no list of records", "allowed: a JSON list of runs")
    found, left = [], {}
    for place, row in enumerate(rows):
        name = str(row.get("id", f"record {place}")) if isinstance(row, dict) else f"record {place}"
        try:
            found.append(parse_run(row, name))
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, ConfigError) as error:
            left[name] = str(error) if not isinstance(error, KeyError) else f"it does not say {error}"
    return found, left


AXES = ("dp", "tp", "pp", "cp", "ep")
ALIASES = {
    "a100": "a100-80",
    "a800": "a100-80",
    "a800-80": "a100-80",
    "h100-80": "h100",
    "h800": "h100",
    "h800-80": "h100",
    "gh200": "h100",
    "h100-94": "h100-500w",
    "h100-96": "h100-500w",
    "h200-141": "h200",
}
MOST = 1 << 40


def count(row: dict[str, Any], key: str, least: int = 1, most: int = MOST) -> int:
    """A whole number that can be."""
    value = int(row[key])
    if value != row[key] or not least <= value <= most:
        raise ValueError(f"{key} = {value}")
    return value


def parse_run(row: dict[str, Any], name: str) -> PublishedRun:
    source, notes = str(row["source"]), str(row.get("notes", ""))
    if "LoRA" in notes:
        raise ConfigError("it trains adapters alone", "allowed: runs that train all parameters")
    assumed: list[str] = []
    model = architecture(row["model"])
    cluster = cluster_of(str(row["gpu"]), count(row, "gpus", most=1 << 24), f"{source} {notes}")
    precision = precision_of(row.get("precision"))
    stack = profile_for_run(source, str(row["layout"].get("sharding")), cluster.device.name, precision)
    places, whole = row["layout"], count(row, "global_batch")
    sharding = sharded(places.get("sharding"), stack, assumed)
    degrees = {axis: count(places, axis, most=1 << 24) if places.get(axis) is not None else 1 for axis in AXES}
    tensor, pipeline, context = degrees["tp"], degrees["pp"], degrees["cp"]
    divided = count(places, "fsdp_degree", most=degrees["dp"]) if places.get("fsdp_degree") else degrees["dp"]
    shard = divided if sharding != "none" else 1
    layout = Layout(pipeline, degrees["dp"] // shard, shard, context, tensor, degrees["ep"])
    micro = row.get("micro_batch")
    if micro is None:
        assumed.append("micro-batch of 1")
    local = whole // degrees["dp"]
    each = int(micro or 1)
    if (
        stack.splits_batch_by_stage and pipeline > 1
    ):  # the record's micro-batch is what all of a pipeline's are cut from
        each = max(1, local // pipeline)
    each = max(1, min(each, local))
    recompute = recomputed(row.get("recompute"), assumed)
    virtual = count(places, "vpp", most=model.layers) if places.get("vpp") else 1
    if pipeline > model.layers or pipeline * virtual > 4 * model.layers:
        raise ValueError(f"{pipeline} stages, {virtual} a rank, of {model.layers} layers")
    sp = places.get("sp")
    if sp is not None:
        stack = replace(stack, sequence_parallel=bool(sp))
    job = PlannedJob(
        model,
        cluster,
        layout,
        Batch(whole, each, degrees["dp"], max(1, local // each)),
        count(row["model"], "seq"),
        sharding,
        precision,
        recompute,
        1,
        "interleaved" if virtual > 1 else "1f1b",
        virtual,
        stack.context_method,
        stack,
    )
    reported = row.get("reported", {})
    seconds = seconds_of(reported, row.get("derived", {}), job)
    memory, counted = memory_of(reported, notes)
    flagged = bool(row.get("quality_flags"))
    return PublishedRun(name, source, job, seconds, memory, counted, bool(reported.get("oom")), flagged, tuple(assumed))


def architecture(model: dict[str, Any]) -> Architecture:
    width, heads = count(model, "hidden", most=1 << 24), count(model, "heads", most=1 << 20)
    vocab = model.get("vocab")
    if vocab is None:
        vocab = 51200  # GPT-2's, filled up
    experts = count(model, "experts", most=1 << 14) if model.get("experts") else 0
    inner = count(model, "ffn", most=1 << 24) if model.get("ffn") else (0 if experts else 4 * width)
    return Architecture(
        str(model.get("name", "")),
        count(model, "layers", most=10_000),
        width,
        heads,
        count(model, "kv_heads", most=heads) if model.get("kv_heads") else heads,
        count(model, "head_dim", most=1 << 16) if model.get("head_dim") else max(1, width // heads),
        inner or int(model.get("moe_ffn") or 4 * width),
        count({"vocab": vocab}, "vocab", most=1 << 24),
        gated=bool(model.get("gated", True)),
        tied_embeddings=bool(model.get("tied", False)),
        norm="rms" if model.get("gated", True) else "layer",
        bias=not model.get("gated", True),
        experts=experts,
        experts_active=int(model.get("topk") or 0),
        experts_shared=int(model.get("shared_experts") or 0),
        expert_ffn=int(model.get("moe_ffn") or 0),
        dense_layers=int(model.get("dense_layers") or 0),
        latent_attention=DEEPSEEK if model.get("attention") == "MLA" else None,
    )


def recomputed(word: Any, assumed: list[str]) -> str:
    if word is None:
        assumed.append("nothing recomputed")
        return "none"
    if str(word) == "selective layer":  # every other one
        return "alternate"
    first = str(word).split(maxsplit=1)[0] if str(word).split() else ""
    if first not in ("none", "full", "selective"):
        assumed.append(f"nothing recomputed, for {first!r}")
        return "none"
    return first


def sharded(word: Any, stack: TrainerProfile, assumed: list[str]) -> str:
    """What a record says of it, or else what its software does."""
    if word is None:
        return stack.default_sharding
    found = SHARDING.get(re.sub(r"[^a-z0-9]", "", str(word).lower()))
    if found is None:
        assumed.append(f"sharding as usual, for {str(word)[:20]!r}")
    return found or stack.default_sharding


def precision_of(word: Any) -> str:
    if word is None:
        return "fp16"
    found = next((kind for part, kind in PRECISIONS.items() if part in str(word).lower()), None)
    if found is None:
        raise ValueError(f"precision {str(word)[:20]!r}")
    return found


def seconds_of(reported: dict[str, Any], derived: dict[str, Any], job: PlannedJob) -> float | None:
    """As printed, or by the tokens or the FLOP of a second that are."""
    for said in (reported, derived):
        if "step_time_s" in said:
            return figure(said["step_time_s"])
    if "samples_per_s" in reported:
        return job.batch.global_ / figure(reported["samples_per_s"])
    for key, devices in (("tokens_per_s", 1), ("tokens_per_s_per_gpu", job.layout.ranks)):
        if key in reported:
            return job.tokens_per_step / figure(reported[key]) / devices
    return None


def figure(value: Any) -> float:
    """Something that somebody measured."""
    found = float(value)
    if not 1e-6 <= found <= 1e12:
        raise ValueError(f"{value} was never measured")
    return found


def memory_of(reported: dict[str, Any], notes: str) -> tuple[float | None, str]:
    if "memory_gb" not in reported:
        return None, "total"
    shown = "nvidia-smi" in notes  # and in gigabytes, where torch's own figures are in GiB
    return figure(reported["memory_gb"]) * (1e9 if shown else 1 << 30), "total" if shown else "reserved"


NETWORKS: tuple[tuple[str, float, bool], ...] = (
    (r"inter-node (\d+) Gb/s", 1, False),
    (r"(\d+)x(?=\d+Gb )", 100, False),
    (r"(\d+) ?Gbps node-node", 1, False),
    (r"(\d+) ?Gb/s [\w-]+ per GPU", 1, True),
    (r"bigscience()", 400, False),  # four adapters of 100 Gb/s a node, which its other records say
)
"""How texts state the network: a number, the Gb/s of one, and whether of one device or of a node."""


def cluster_of(gpu: str, devices: int, text: str) -> Cluster:
    word = re.sub(r"nvidia[ -]|-?sxm\d?|-?hbm\w*|gb\b", "", gpu.lower()).strip().split(" ")[0]
    name = "h100-500w" if "500w" in gpu.lower() else ALIASES.get(word, word)
    if name not in NODE_TYPES:
        raise ConfigError(f"nothing is known of {gpu}", f"allowed: {', '.join(NODE_TYPES)}")
    cluster = preset_cluster(name, devices)
    for pattern, rate, each in NETWORKS:
        if found := re.search(pattern, text):
            share = figure(found[1] or 1) * rate / 8 * GB / (1 if each else NODE_TYPES[name].devices)
            cluster = replace(cluster, inter_node=replace(cluster.inter_node, bandwidth=share))
            break
    return cluster
