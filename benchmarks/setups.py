"""Ten well-known set-ups: the published layout and MFU beside what the planner picks and predicts for the same trainer.

Each set-up is planned under the profile of its trainer. `layout / pick` is the predicted step time of the published
degrees and sharding, with the best micro-batch, schedule and activation checkpointing that fit, relative to that of the
plan. `MFU` is the predicted MFU of the run with all its published settings, and `published MFU` the one that follows
from the published rate, both with 6 FLOP per active parameter and token and the causal half of the scores.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.models.architecture import Architecture
from meshwright.base.topology.layout import Layout
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.published.published_models import parse_model
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import describe_plan
from meshwright.planner.search.candidate import Candidate, candidate_job
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.search import search
from meshwright.planner.search.trainer_rules import mfu_with_masked_scores
from meshwright.planner.workload.workload import Workload
from meshwright.planner.workload.workload_args import build_workload, for_trainer

TOLERANCE = 0.1
GPT = {"gated": False, "tied": True, "vocab": 50368}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-3 175B": {"layers": 96, "hidden": 12288, "heads": 96, "gated": False, "tied": True, "vocab": 51200},
    "MPT 70B": {"layers": 80, "hidden": 8192, "heads": 64, **GPT},
    "MPT 1B": {"layers": 24, "hidden": 2048, "heads": 16, **GPT},
    "DeepSeek-V3": {
        "layers": 61, "hidden": 7168, "heads": 128, "head_dim": 128, "ffn": 18432, "vocab": 129280, "experts": 256,
        "topk": 8, "shared_experts": 1, "moe_ffn": 2048, "dense_layers": 3, "attention": "MLA",
    },
    "Llama 2 7B": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000},
}  # fmt: skip
"""Sizes of models that are no preset, under the keys of examples/published_runs.json."""


@dataclass(frozen=True)
class Setup:
    """A published training run, as far as its source states it."""

    name: str
    model: str
    """a preset, or a key of MODELS"""
    cluster: str
    trainer: str
    batch: int
    sequence: int
    layout: Candidate
    source: str
    tokens: float | None = None
    """published tokens per second and device"""
    teraflops: float | None = None
    """published TFLOP/s per device"""
    flops: str = "causal"
    """what `teraflops` counts: causal; whole, with the masked half of the scores; hardware, whole with recomputation"""
    precision: str = "bf16"
    peak_precision: str = "bf16"
    """the precision whose peak the published MFU refers to"""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """fields of the trainer's profile that the source states otherwise"""


SETUPS = (
    Setup(
        "Llama 3 405B on 16,384 H100", "llama-405b", "h100:8x2048", "meta-2024", 2048, 8192,
        Candidate(Layout(16, shard=128, tensor=8), 1, "gradients", "none", "interleaved", 8),
        "arXiv:2407.21783, table 4; stages per rank are not stated", teraflops=400,
    ),
    Setup(
        "MPT 70B on 512 H100", "MPT 70B", "h100:8x64", "llm-foundry", 4096, 2048,
        Candidate(Layout(shard=512), 8, "parameters", "full"),
        "mosaicml/llm-foundry, scripts/train/benchmarking", tokens=1007,
    ),
    Setup(
        "Llama 3 8B on 8 H100 (500 W)", "llama-8b", "h100-500w:8", "torchtitan-2024", 16, 8192,
        Candidate(Layout(shard=8), 2, "parameters", "selective"),
        "pytorch/torchtitan, benchmarks, December 2024", tokens=5762,
    ),
    Setup(
        "Llama 3 8B on 64 A100", "llama-8b", "a100-80:8x8", "torchtitan-2024", 64, 8192,
        Candidate(Layout(shard=64), 1, "parameters", "selective"),
        "pytorch/torchtitan, docs/performance.md, 2024", tokens=2973,
    ),
    Setup(
        "Llama 3 8B on 512 H100 (500 W)", "llama-8b", "h100-500w:8x64", "torchtitan-2024", 1024, 8192,
        Candidate(Layout(shard=512), 2, "parameters", "selective"),
        "pytorch/torchtitan, benchmarks, December 2024, on 128 devices", tokens=5605,
    ),
    Setup(
        "Mixtral 8x7B on 64 H100", "mixtral-8x7b", "h100:8x8", "megatron", 256, 4096,
        Candidate(Layout(4, shard=16, expert=8), 1, "optimizer", "none", "interleaved", 8),
        "NVIDIA/Megatron-LM, MoE README; batch and stages per rank are not stated", teraflops=468,
    ),
    Setup(
        "DeepSeek-V3 on 2,048 H800", "DeepSeek-V3", "h800:8x256", "hai-llm", 15360, 4096,
        Candidate(Layout(16, shard=128, expert=64), 1, "optimizer", "selective", "dualpipev", 2),
        "arXiv:2412.19437: 2.664 M GPU-hours for 14.8 T tokens", tokens=14.8e12 / (2.664e6 * 3600), precision="fp8",
    ),
    Setup(
        "GPT-3 175B on 1,024 A100", "GPT-3 175B", "a100-80:8x128", "megatron-2021", 1536, 2048,
        Candidate(Layout(16, replicate=8, tensor=8), 1, "none", "full", "interleaved", 2),
        "arXiv:2104.04473, section 5.1; stages per rank are not stated", teraflops=140, flops="hardware",
        precision="fp16",
    ),
    Setup(
        "MPT 1B on 8 H100", "MPT 1B", "h100:8", "llm-foundry", 96, 8192,
        Candidate(Layout(shard=8), 3, "parameters", "none"),
        "mosaicml/llm-foundry, scripts/train/benchmarking", tokens=29157,
    ),
    Setup(
        "Llama 2 7B on 2 A100-40", "Llama 2 7B", "a100-40:2", "meshwright", 64, 4096,
        Candidate(Layout(shard=2), 1, "parameters", "full", offload=True), "no published run",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """A set-up as it was published, and as it is predicted."""

    setup: Setup
    run: Estimate
    """the published run"""
    layout: Estimate | None
    """the published degrees and sharding with the best other settings; None if none of them fits with headroom"""
    pick: Estimate
    published_seconds: float | None
    cpu_seconds: float

    @property
    def slowdown(self) -> float:
        """The predicted step time of the published layout relative to that of the plan."""
        return (self.layout or self.run).seconds / self.pick.seconds

    @property
    def mfu(self) -> float:
        return self.mfu_at(self.run.seconds)

    @property
    def published_mfu(self) -> float | None:
        return None if self.published_seconds is None else self.mfu_at(self.published_seconds)

    @property
    def mfu_error(self) -> float | None:
        return None if self.published_seconds is None else self.published_seconds / self.run.seconds - 1

    def mfu_at(self, seconds: float) -> float:
        job = self.run.job
        peak = job.cluster.device.peak_flops[self.setup.peak_precision] * job.layout.ranks
        return self.run.model_flops / seconds / peak


def workload(setup: Setup) -> Workload:
    if setup.model in MODELS:
        model: Architecture = parse_model({"name": setup.model, **MODELS[setup.model]}).sizes
        work = Workload(model, setup.batch, setup.sequence, setup.precision)
    else:
        work = build_workload(setup.model, (), setup.batch, setup.sequence)
    work = for_trainer(work, setup.trainer)
    return replace(work, trainer=replace(work.trainer, **setup.flags)) if work.trainer is not None else work


def published_seconds(setup: Setup, plan: Estimate) -> float | None:
    """Returns the step time that a published rate means."""
    devices = plan.job.layout.ranks
    if setup.tokens is not None:
        return plan.job.tokens_per_step / setup.tokens / devices
    if setup.teraflops is None:
        return None
    whole = mfu_with_masked_scores(plan) / plan.mfu * plan.model_flops
    counted = {
        "causal": plan.model_flops, "whole": whole, "hardware": whole * plan.hardware_flops / plan.model_flops
    }[setup.flops]  # fmt: skip
    return counted / (setup.teraflops * 1e12 * devices)


def compare(setup: Setup) -> Comparison:
    started = time.process_time()
    work, cluster = workload(setup), resolve_cluster(setup.cluster)
    pick = search(CostCache(work, cluster)).ranked[0]
    cpu_seconds = time.process_time() - started
    run = estimate(candidate_job(work.on(cluster), cluster, setup.layout), simulate_pipeline=True)
    pinned = search(CostCache(replace(work, pinned=pins(setup.layout)), cluster)).ranked
    return Comparison(setup, run, pinned[0] if pinned else None, pick, published_seconds(setup, run), cpu_seconds)


def pins(candidate: Candidate) -> dict[str, int | str | bool]:
    """Returns the config keys of the degrees and the sharding of a candidate."""
    layout = candidate.layout
    degrees = {f"layout.{axis}": getattr(layout, axis) for axis in ("pipeline", "context", "tensor", "expert")}
    return degrees | {"layout.shard": candidate.sharding}


def row(comparison: Comparison) -> dict[str, Any]:
    setup, run = comparison.setup, comparison.run
    error = comparison.mfu_error
    return {
        "setup": setup.name,
        "trainer": setup.trainer,
        "published": describe_plan(run.job),
        "layout at its best": describe_plan(comparison.layout.job) if comparison.layout else "does not fit",
        "pick": describe_plan(comparison.pick.job),
        "layout / pick": round(comparison.slowdown, 3),
        "memory": round(run.peak_memory.total / run.job.cluster.device.memory, 3),
        "MFU": round(comparison.mfu, 4),
        "published MFU": None if comparison.published_mfu is None else round(comparison.published_mfu, 4),
        "MFU error": None if error is None else round(error, 3),
        "within 10 %": comparison.slowdown <= 1 + TOLERANCE and (error is None or abs(error) <= TOLERANCE),
        "cpu seconds": round(comparison.cpu_seconds, 2),
        "source": setup.source,
    }


def measure() -> dict[str, Any]:
    rows = []
    for setup in SETUPS:
        rows.append(row(compare(setup)))
        print(f"setups: {rows[-1]}", file=sys.stderr)
    return {"rows": rows, "within 10 %": sum(each["within 10 %"] for each in rows), "of": len(rows)}
