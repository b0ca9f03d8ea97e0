"""What the proof runs of a config do not cover, in plain sentences, and how long they take. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence

from meshwright.config import RunConfig
from meshwright.prover.shrink.layouts import pairs
from meshwright.prover.shrink.runs import ProofRun
from meshwright.prover.shrink.sizes import user_accumulation
from meshwright.topology.axes import AXIS_TABLE
from meshwright.topology.layout import Layout
from meshwright.topology.unsupported import validate

START_SECONDS = 1.5
RANK_SECONDS = 0.3
STEP_SECONDS = 0.02
BLOCK_PASS_SECONDS = 0.002
COMPILE_SECONDS = 20.0
ATTENTION_PAIR_SECONDS = 2e-9


def not_proven(config: RunConfig, runs: Sequence[ProofRun], devices: int = 0) -> list[str]:
    """One sentence for everything that no run covers; `devices` is the number of CUDA devices of this machine."""
    return [
        *([] if devices or config.launch.device == "cpu" else ["the kernels of CUDA: this machine has no CUDA device"]),
        *(["communication and memory counters of compiled blocks"] if config.compile.enabled else []),
        *unproven_degrees(config, runs),
        *unproven_pairs(config, runs),
        *unproven_sizes(config, runs),
        *unproven_settings(config, runs),
    ]


def unproven_degrees(config: RunConfig, runs: Sequence[ProofRun]) -> list[str]:
    layout = Layout.from_config(config.layout)
    sentences = []
    for axis in AXIS_TABLE:
        degree = getattr(layout, axis.name)
        proven = {getattr(Layout.from_config(run.config.layout), axis.name) for run in runs}
        if degree > 1 and degree not in proven:
            largest = ", ".join(str(number) for number in sorted(proven - {1}))
            sentences.append(f"{axis.name} parallelism of degree {degree} (proven with degree {largest})")
    return sentences


def unproven_pairs(config: RunConfig, runs: Sequence[ProofRun]) -> list[str]:
    covered = set().union(*(pairs(run.config.layout) for run in runs))
    missing = sorted(" with ".join(sorted(pair)) for pair in pairs(config.layout) - covered)
    return [f"{pair} parallelism in one layout" for pair in missing]


def unproven_sizes(config: RunConfig, runs: Sequence[ProofRun]) -> list[str]:
    sentences = []
    sequence = max(run.config.data.sequence for run in runs)
    if config.data.sequence > sequence:
        sentences.append(f"data.sequence = {config.data.sequence:,} (proven up to {sequence:,})")
    accumulation = max(validate(run.config)[1].accumulation for run in runs)
    if user_accumulation(config) > accumulation:
        sentences.append(f"{user_accumulation(config)} micro-batches per step (proven with {accumulation})")
    ratio = max(run.config.model.heads // run.config.model.kv_heads for run in runs)
    if config.model.heads // config.model.kv_heads > ratio:
        sentences.append(
            f"{config.model.heads // config.model.kv_heads} query heads per key head (proven with {ratio})"
        )
    return sentences


def unproven_settings(config: RunConfig, runs: Sequence[ProofRun]) -> list[str]:
    sentences = []
    if config.model.experts and config.model.capacity_factor:
        if not any(run.config.model.capacity_factor for run in runs):
            sentences.append("model.capacity_factor with context or tensor parallelism")
        else:
            sentences.append("a resume on another layout, whose results depend on it with model.capacity_factor")
    elif not any(run.resume_layout for run in runs):
        sentences.append("a resume on another layout: no other layout of at most four ranks supports this model")
    if config.precision.compute == "fp16" and config.precision.scale_interval > max(run.config.steps for run in runs):
        sentences.append(f"the growth of the loss scale after {config.precision.scale_interval:,} finite steps")
    return sentences


def estimate_seconds(runs: Sequence[ProofRun]) -> float:
    """The time of all runs on this machine."""
    return sum(estimate_run(run.config) for run in runs)


def estimate_run(config: RunConfig) -> float:
    layout, batch = validate(config)
    cores = os.cpu_count() or 1
    ranks = max(1.0, layout.ranks / cores)
    passes = config.model.layers / layout.pipeline * batch.accumulation * ranks
    pairs_per_step = config.data.sequence**2 * config.model.heads * batch.local * config.model.layers
    step = STEP_SECONDS * ranks + BLOCK_PASS_SECONDS * passes + ATTENTION_PAIR_SECONDS * pairs_per_step * ranks
    compilation = COMPILE_SECONDS if config.compile.enabled else 0.0
    return START_SECONDS + RANK_SECONDS * layout.ranks + config.steps * step + compilation
