"""What the proof runs of a config do not cover, in plain sentences, and how long they take. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Sequence

from meshwright.base.config import RunConfig
from meshwright.base.models.registry import run_spec
from meshwright.base.topology.axes import AXIS_TABLE
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import uses_fsdp
from meshwright.base.topology.unsupported import validate
from meshwright.prover.shrink.layouts import pairs
from meshwright.prover.shrink.runs import ProofRun
from meshwright.prover.shrink.sizes import user_accumulation

START_SECONDS = 0.5
"""of a run, in which its ranks wait for each other"""
RANK_SECONDS = 0.3
"""of a core, to start and end a rank"""
PASS_SECONDS = 0.0025
"""of a core, for forward and backward of a micro-batch through a small block on one rank"""
FSDP_SECONDS = 0.0075
CONTEXT_SECONDS = 0.003
TENSOR_SECONDS = 0.016
EXPERTS_SECONDS = 0.005
"""of a core, per pass in addition, for the collectives and wrappers of an axis and for routing"""
REFERENCE_PASS_SECONDS = 0.004
"""of a core, for forward and backward of a step through a small block in the reference"""
REFERENCES = 2
"""how many times the reference computes a run: once for its values, and once for its rounding"""
COMPILE_SECONDS = 15.0
"""of a core, to compile the blocks of a rank"""
MULTIPLY_ADDS_PER_SECOND = 5e9
"""of a core, in float64"""

INITIAL_WEIGHTS = "training from the weights of init_from: proof runs initialize theirs from the seed"


def not_proven(config: RunConfig, runs: Sequence[ProofRun], devices: int = 0) -> list[str]:
    """One sentence for everything that no run covers; `devices` is the number of CUDA devices of this machine."""
    return [
        *([] if devices or config.launch.device == "cpu" else ["the kernels of CUDA: this machine has no CUDA device"]),
        *([INITIAL_WEIGHTS] if config.init_from else []),
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
            degrees = ", ".join(str(number) for number in sorted(proven - {1}))
            extent = f"degree {degrees}" if degrees else "one rank"
            sentences.append(f"{axis.name} parallelism of degree {degree} (proven with {extent})")
    return sentences


def unproven_pairs(config: RunConfig, runs: Sequence[ProofRun]) -> list[str]:
    covered = set().union(*(pairs(run.config.layout) for run in runs))
    missing = sorted(" with ".join(sorted(pair)) for pair in pairs(config.layout) - covered)
    return [f"{pair} parallelism in one layout" for pair in missing]


def unproven_sizes(config: RunConfig, runs: Sequence[ProofRun]) -> list[str]:
    sentences = []
    width = max(run.config.model.width for run in runs)
    if config.model.width > width:
        sentences.append(f"the kernels of model.width = {config.model.width:,} (proven at {width:,}; --full keeps it)")
    sequence = max(run.config.data.sequence for run in runs)
    if config.data.sequence > sequence:
        sentences.append(f"data.sequence = {config.data.sequence:,} (proven up to {sequence:,})")
    accumulation = max(validate(run.config)[1].accumulation for run in runs)
    if user_accumulation(config) > accumulation:
        sentences.append(f"{user_accumulation(config)} micro-batches per step (proven with {accumulation})")
    for name, size in (("vocab", config.model.vocab), ("experts", config.model.experts)):
        proven = max(getattr(run.config.model, name) for run in runs)
        if size > proven:
            sentences.append(f"model.{name} = {size:,} (proven up to {proven:,})")
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
        sentences.append("a resume on another layout: the run is too short, or no small layout supports it")
    if not any(run.name.startswith("variation") for run in runs):
        sentences.append("other shapes than the user's: no layout with an axis of degree three supports the settings")
    return sentences


def estimate_seconds(runs: Sequence[ProofRun]) -> float:
    """The time of all runs and their references on this machine. A resume repeats half of the steps."""
    cores = os.cpu_count() or 1
    seconds = 0.0
    for run in runs:
        steps = run.config.steps - run.first_step
        if run.resume_layout is None:
            seconds += estimate_run(run.config, steps, cores) + estimate_reference(run.config, steps) / cores
        else:
            seconds += estimate_run(run.resume_layout, steps // 2, cores)
    return seconds


def estimate_run(config: RunConfig, steps: int, cores: int) -> float:
    """The ranks share the cores."""
    layout, batch = validate(config)
    overhead = PASS_SECONDS + FSDP_SECONDS * uses_fsdp(layout)
    overhead += CONTEXT_SECONDS * (layout.context > 1) + TENSOR_SECONDS * (layout.tensor > 1)
    overhead += EXPERTS_SECONDS * (config.model.experts > 0)
    passes = config.model.layers / layout.pipeline * batch.accumulation
    work = 3 * block_multiply_adds(config) * batch.micro
    compute = work / (layout.context * layout.tensor) / MULTIPLY_ADDS_PER_SECOND
    compilation = COMPILE_SECONDS if config.compile.enabled else 0.0
    of_a_rank = RANK_SECONDS + compilation + steps * passes * (overhead + compute)
    return START_SECONDS + of_a_rank * max(1.0, layout.ranks / cores)


def block_multiply_adds(config: RunConfig) -> float:
    """Multiply-adds of a block's forward pass per sample."""
    return run_spec(config).blocks[0].cost.flops.of(1, config.data.sequence) / 2


def estimate_reference(config: RunConfig, steps: int) -> float:
    work = 3 * block_multiply_adds(config) * config.batch.global_
    of_a_block = REFERENCE_PASS_SECONDS + work / MULTIPLY_ADDS_PER_SECOND
    return REFERENCES * steps * config.model.layers * of_a_block
