"""Reads published training runs as jobs that the planner can estimate.

A file of runs is untrusted: each field is validated. Settings that a run does not state are assumed, and the assumption
is recorded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from meshwright.config import Batch
from meshwright.config.reader import shorten
from meshwright.errors import ConfigError
from meshwright.io import parse_json, read_regular_file
from meshwright.models.architecture import Architecture, LatentAttention
from meshwright.planner.hardware.cluster import GB, NODE_TYPES, Cluster, preset_cluster
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.trainer_profiles import profile_for_run
from meshwright.topology.layout import Layout

MAX_RUNS = 5_000
"""Limit on the runs in a file."""
MAX_FILE_BYTES = 16 << 20
"""Size limit of a file of runs."""
MAX_COUNT = 1 << 40
"""Limit on any count that a run states."""
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
PRECISIONS = {"fp4": "fp4", "fp8": "fp8", "bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
"""Text in a run's name of its precision -> precision; the first match counts."""
DEEPSEEK_ATTENTION = LatentAttention(1536, 512, 128, 64, 128)
"""DeepSeek-V3's sizes, the only published ones of MLA, for a run that states no more than that it uses MLA."""
RECORD_FIELDS = {"id": str, "source": str, "gpu": str, "gpus": int, "model": dict, "layout": dict, "reported": dict}
"""The fields that every record has."""
DEGREES = ("dp", "tp", "pp", "cp", "ep")
DEVICE_ALIASES = {
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
"""A run's name of its GPU -> the planner's."""


@dataclass(frozen=True)
class PublishedRun:
    """A run that somebody measured and published, and the job that it was."""

    name: str
    """id of the run in its file"""
    source: str
    """who published it, and where"""
    job: PlannedJob
    """the job, as far as it is stated"""
    seconds: float | None
    """measured step time"""
    memory: float | None
    """measured memory in bytes, of the kind that `memory_kind` gives"""
    memory_kind: str
    """reserved (peak of the allocator) or total (what nvidia-smi shows)"""
    out_of_memory: bool
    """whether the run failed for lack of memory"""
    flagged: bool
    """whether its source or its collector doubts the numbers"""
    assumptions: tuple[str, ...]
    """settings that the run does not state"""

    @property
    def fully_stated(self) -> bool:
        """Whether the run states activation checkpointing and micro-batch, and is not flagged.

        Vocabulary, half precision and sharding are taken from the trainer if a run, such as vTrain's, omits them.
        """
        return not self.flagged and not self.assumptions


def read_published_runs(path: Path) -> tuple[list[PublishedRun], dict[str, str]]:
    """Reads a file of runs; returns those that the planner can estimate, and the reason for each excluded one."""
    expected = "a JSON list of runs"
    content = read_regular_file(path, MAX_FILE_BYTES, f"file of runs {path}", expected)
    rows = parse_json(content, f"file of runs {path}", expected)
    if not isinstance(rows, list) or len(rows) > MAX_RUNS:
        raise ConfigError(f"{path} is not a list of at most {MAX_RUNS:,} runs", f"expected {expected}")
    if not rows:
        raise ConfigError(f"{path} contains no run", f"expected {expected}")
    runs: list[PublishedRun] = []
    excluded: dict[str, str] = {}
    names: set[str] = set()
    for index, row in enumerate(rows):
        try:
            name = validate_record(row, names)
            runs.append(parse_run(row, name))
        except ConfigError as error:
            excluded[name] = str(error)
        except KeyError as error:
            excluded[name] = f"it does not state {error}"
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            shown = f" ({shorten(repr(row['id']))})" if isinstance(row, dict) and "id" in row else ""
            raise ConfigError(
                f"file of runs {path}, record {index}{shown} is not valid: {shorten(str(error), 200)}",
                "expected the fields of examples/published_runs.json",
            ) from None
    return runs, excluded


def validate_record(row: Any, names: set[str]) -> str:
    """Returns the name of a run and adds it to `names`; raises ValueError if the record has not the form of a run.

    A record of this form may still omit a size, which excludes the run from the scores.
    """
    if not isinstance(row, dict):
        raise ValueError(f"it is {shorten(repr(row))} and not an object")
    for key, kind in RECORD_FIELDS.items():
        if not isinstance(row.get(key), kind) or isinstance(row.get(key), bool):
            raise ValueError(f"{key} is {shorten(repr(row.get(key)))}, expected {kind.__name__}")
    if row["id"] in names:
        raise ValueError("an earlier record has the same id")
    names.add(row["id"])
    return str(row["id"])


def parse_count(row: dict[str, Any], key: str, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
    """Returns an integer in a range, or raises ValueError."""
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{key} = {value!r} is not an integer")
    if not minimum <= value <= maximum:
        raise ValueError(f"{key} = {value} is out of range, expected from {minimum:,} to {maximum:,}")
    return int(value)


def optional_count(row: dict[str, Any], key: str) -> int:
    """Returns an integer of at least 0, or 0 if it is not stated; raises ValueError for anything else."""
    return parse_count(row, key, 0, 1 << 24) if row.get(key) is not None else 0


def parse_run(row: dict[str, Any], name: str) -> PublishedRun:
    """Parses one run; raises an error if it is not a full training run of a decoder on known devices."""
    source, notes = str(row["source"]), str(row.get("notes", ""))
    if "LoRA" in notes:
        raise ConfigError("it trains adapters only (LoRA)", "expected a run that trains all parameters")
    assumptions: list[str] = []
    model = parse_model(row["model"])
    cluster = parse_cluster(str(row["gpu"]), parse_count(row, "gpus", maximum=1 << 24), f"{source} {notes}")
    precision = parse_precision(row.get("precision"))
    stated_layout, global_batch = row["layout"], parse_count(row, "global_batch")
    trainer = profile_for_run(source, str(stated_layout.get("sharding")), cluster.device.name, precision)
    sharding = parse_sharding(stated_layout.get("sharding"), trainer, assumptions)
    degrees = {
        axis: parse_count(stated_layout, axis, maximum=1 << 24) if stated_layout.get(axis) is not None else 1
        for axis in DEGREES
    }
    data, pipeline = degrees["dp"], degrees["pp"]
    if stated_layout.get("dp") is not None and prod(degrees[axis] for axis in DEGREES[:4]) != row["gpus"]:
        raise ValueError(f"dp x tp x pp x cp is not gpus = {row['gpus']}")
    fsdp_degree = parse_count(stated_layout, "fsdp_degree", maximum=data) if stated_layout.get("fsdp_degree") else data
    shard = fsdp_degree if sharding != "none" else 1
    layout = Layout(pipeline, data // shard, shard, degrees["cp"], degrees["tp"], degrees["ep"])
    if row.get("micro_batch") is None:
        assumptions.append("micro-batch of 1")
    local_batch = global_batch // data
    micro = parse_count(row, "micro_batch") if row.get("micro_batch") is not None else 1
    if trainer.splits_batch_by_stage and pipeline > 1:  # the stated micro-batch is split over the pipeline
        micro = max(1, local_batch // pipeline)
    micro = max(1, min(micro, local_batch))
    activation_checkpoint = parse_activation_checkpoint(row.get("recompute"), assumptions)
    stages = parse_count(stated_layout, "vpp", maximum=model.layers) if stated_layout.get("vpp") else 1
    if pipeline > model.layers or pipeline * stages > 4 * model.layers:
        raise ValueError(f"{model.layers} layers cannot be split into {pipeline} x {stages} pipeline stages")
    if stated_layout.get("sp") is not None:
        trainer = replace(trainer, sequence_parallel=bool(stated_layout["sp"]))
    job = PlannedJob(
        model,
        cluster,
        layout,
        Batch(global_batch, micro, data, max(1, local_batch // micro)),
        parse_count(row["model"], "seq"),
        sharding,
        precision,
        activation_checkpoint,
        1,
        "interleaved" if stages > 1 else "1f1b",
        stages,
        trainer.context_method,
        trainer,
    )
    reported = row.get("reported", {})
    seconds = parse_seconds(reported, row.get("derived", {}), job)
    memory, memory_kind = parse_memory(reported, notes)
    out_of_memory, flagged = bool(reported.get("oom")), bool(row.get("quality_flags"))
    return PublishedRun(name, source, job, seconds, memory, memory_kind, out_of_memory, flagged, tuple(assumptions))


def parse_model(model: dict[str, Any]) -> Architecture:
    """Parses the sizes of a model."""
    width, heads = parse_count(model, "hidden", maximum=1 << 24), parse_count(model, "heads", maximum=1 << 20)
    vocab = model.get("vocab")
    if vocab is None:
        vocab = 51200  # GPT-2's vocabulary, padded
    experts = parse_count(model, "experts", maximum=1 << 14) if model.get("experts") else 0
    ffn = parse_count(model, "ffn", maximum=1 << 24) if model.get("ffn") else (0 if experts else 4 * width)
    return Architecture(
        str(model.get("name", "")),
        parse_count(model, "layers", maximum=10_000),
        width,
        heads,
        parse_count(model, "kv_heads", maximum=heads) if model.get("kv_heads") else heads,
        parse_count(model, "head_dim", maximum=1 << 16) if model.get("head_dim") else max(1, width // heads),
        ffn or optional_count(model, "moe_ffn") or 4 * width,
        parse_count({"vocab": vocab}, "vocab", maximum=1 << 24),
        gated=bool(model.get("gated", True)),
        tied_embeddings=bool(model.get("tied", False)),
        norm="rms" if model.get("gated", True) else "layer",
        bias=not model.get("gated", True),
        experts=experts,
        experts_active=optional_count(model, "topk"),
        experts_shared=optional_count(model, "shared_experts"),
        expert_ffn=optional_count(model, "moe_ffn"),
        dense_layers=optional_count(model, "dense_layers"),
        latent_attention=DEEPSEEK_ATTENTION if model.get("attention") == "MLA" else None,
    )


def parse_activation_checkpoint(stated: Any, assumptions: list[str]) -> str:
    """Returns the mode of activation checkpointing that a run states, or assumes none."""
    if stated is None:
        assumptions.append("no activation checkpointing")
        return "none"
    if str(stated) == "selective layer":  # every other block
        return "alternate"
    mode = str(stated).split(maxsplit=1)[0] if str(stated).split() else ""
    if mode not in ("none", "full", "selective"):
        assumptions.append(f"no activation checkpointing, for {mode!r}")
        return "none"
    return mode


def parse_sharding(stated: Any, trainer: TrainerProfile, assumptions: list[str]) -> str:
    """Returns the sharding that a run states, or the default of its trainer."""
    if stated is None:
        return trainer.default_sharding
    sharding = SHARDING.get(re.sub(r"[^a-z0-9]", "", str(stated).lower()))
    if sharding is None:
        assumptions.append(f"default sharding of the trainer, for {str(stated)[:20]!r}")
    return sharding or trainer.default_sharding


def parse_precision(stated: Any) -> str:
    """Returns the precision that a run states, or fp16."""
    if stated is None:
        return "fp16"
    precision = next((precision for text, precision in PRECISIONS.items() if text in str(stated).lower()), None)
    if precision is None:
        raise ConfigError(f"precision {str(stated)[:20]!r} is unknown", f"expected one of {', '.join(PRECISIONS)}")
    return precision


def parse_seconds(reported: dict[str, Any], derived: dict[str, Any], job: PlannedJob) -> float | None:
    """Returns the step time that a run reports, or the one that follows from its throughput."""
    for figures in (reported, derived):
        if "step_time_s" in figures:
            return parse_measurement(figures["step_time_s"])
    if "samples_per_s" in reported:
        return job.batch.global_ / parse_measurement(reported["samples_per_s"])
    for key, devices in (("tokens_per_s", 1), ("tokens_per_s_per_gpu", job.layout.ranks)):
        if key in reported:
            return job.tokens_per_step / parse_measurement(reported[key]) / devices
    return None


def parse_measurement(value: Any) -> float:
    """Returns a number in the range of possible measurements, or raises ValueError."""
    number = float(value) if not isinstance(value, bool) else 0.0
    if not 1e-6 <= number <= 1e12:
        raise ValueError(f"{value} is not a possible measurement")
    return number


def parse_memory(reported: dict[str, Any], notes: str) -> tuple[float | None, str]:
    """Returns memory in bytes and its kind; nvidia-smi's figures are in GB, torch's are in GiB."""
    if "memory_gb" not in reported:
        return None, "total"
    nvidia_smi = "nvidia-smi" in notes
    bytes_per_unit = 1e9 if nvidia_smi else 1 << 30
    return parse_measurement(reported["memory_gb"]) * bytes_per_unit, "total" if nvidia_smi else "reserved"


NETWORKS: tuple[tuple[str, float, bool], ...] = (
    (r"inter-node (\d+) Gb/s", 1, False),
    (r"(\d+)x(?=\d+Gb )", 100, False),
    (r"(\d+) ?Gbps node-node", 1, False),
    (r"(\d+) ?Gb/s [\w-]+ per GPU", 1, True),
    (r"bigscience()", 400, False),  # four adapters of 100 Gb/s per node, which its other records state
)
"""How runs state their network: a pattern for a number, the Gb/s of one unit, and whether it is per device or node."""


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
            bandwidth = parse_measurement(match[1] or 1) * gigabits / 8 * GB / divisor
            return replace(cluster, inter_node=replace(cluster.inter_node, bandwidth=bandwidth))
    return cluster
