"""Checks that a layout computes what a single process computes: loss, every gradient, gradient norm, three optimizer
steps and an evaluation, with unequal masks, gradient accumulation, and tied and untied weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Literal

from meshwright.config import FSDPConfig, PipelineConfig, RunConfig
from meshwright.launch.ranks import run_ranks
from meshwright.prover.discrepancy import Tolerance, find_first_discrepancy
from meshwright.prover.reference import SEQUENCE, StepResults, proof_settings, run_parallel, run_single_process
from meshwright.prover.scale_down import scale_layout, scale_model, scale_sequence
from meshwright.topology.layout import Layout, stages_per_rank
from meshwright.topology.schedules import SCHEDULES
from meshwright.topology.unsupported import min_shard_group_size, validate

TOLERANCE: dict[Literal["fp64", "fp32"], Tolerance] = {
    "fp64": Tolerance(1e-10, 1e-10),
    "fp32": Tolerance(2e-5, 1e-4),
}
"""float64 leaves room for 1e6 rounding errors. float32 leaves room for about 300, which sums in another order may need,
and for five times as many after three steps."""

ACCUMULATION = 3
MICRO = 2


def check_layouts(config: RunConfig) -> Iterator[tuple[str, bool, str]]:
    """Compares the layout with a single process, for every proof config."""
    proofs, note = proof_configs(config)
    # The reference runs in its own process too: autograd here would initialize CUDA, which does not survive a fork.
    [expected] = run_ranks(run_single_process, 1, proofs, launch=proofs[0].launch)
    layout = Layout.from_config(proofs[0].layout)
    results = run_ranks(run_parallel, layout.ranks, proofs, launch=proofs[0].launch, timeout=300.0)
    for index, proof in enumerate(proofs):
        yield compare_results(proof, expected[index], [of_rank[index] for of_rank in results], note)


def proof_configs(config: RunConfig) -> tuple[list[RunConfig], str]:
    """The configs that are compared, and a note on what was scaled down: both precisions, because torch takes different
    code paths, and tied and untied weights.
    """
    layout_config, layout_changes = scale_layout(config.layout)
    layout = Layout.from_config(layout_config)
    config = replace(config, pipeline=limit_stages(config))
    model, model_changes = scale_model(config, layout)
    model = replace(model, capacity_factor=0.0)
    accumulation = accumulation_steps(config, layout)
    proof = replace(
        proof_settings(config),
        model=model,
        layout=layout_config,
        data=replace(config.data, sequence=scale_sequence(config, layout, SEQUENCE)),
        batch=replace(config.batch, global_=layout.data_degree * accumulation * MICRO, micro=MICRO),
        fsdp=fit_reshard_degree(config.fsdp, min_shard_group_size(layout)),
    )
    note = "; on CPU"
    note += f", layout scaled down ({layout_changes})" if layout_changes else ""
    note += f", model scaled down ({model_changes})" if model_changes else ""
    if config.ddp.comm_hook != "none":
        note += f", without ddp.comm_hook = {config.ddp.comm_hook}, which rounds gradients"
    if config.model.capacity_factor:
        note += ", without model.capacity_factor, which makes results depend on the layout"
    if config.precision.compute not in TOLERANCE:
        note += f", not in {config.precision.compute}, whose rounding hides errors"
    separator = 0 if model.separator is None and layout.context > 1 else model.separator
    other_model = replace(model, tie=not model.tie, separator=separator)
    compute = {name: replace(config.precision, compute=name) for name in TOLERANCE}
    return [
        replace(proof, precision=compute["fp64"]),
        replace(proof, precision=compute["fp32"]),
        replace(proof, precision=compute["fp64"], model=other_model),
    ], note


def limit_stages(config: RunConfig) -> PipelineConfig:
    """The pipeline with at most the schedule's default number of stages per rank."""
    default = SCHEDULES[config.pipeline.schedule].default_stages
    return replace(config.pipeline, stages=min(config.pipeline.stages or default, default))


def accumulation_steps(config: RunConfig, layout: Layout) -> int:
    """The smallest number of micro-batches above one that the pipeline schedule supports. DDP with static_graph cannot
    skip the synchronization of its first backward, so such a config does not accumulate.
    """
    if layout.pipeline == 1:
        return 1 if config.ddp.static_graph else ACCUMULATION
    schedule, ranks = config.pipeline.schedule, layout.pipeline
    minimum = max(ACCUMULATION, SCHEDULES[schedule].min_micro_batches(ranks))
    return next(m for m in count(minimum) if m % max(1, m // ranks) == 0)


def fit_reshard_degree(fsdp: FSDPConfig, shard_group_size: int) -> FSDPConfig:
    """`fsdp.reshard_after_forward` for a smaller shard group: unchanged if it divides the group, else half of it."""
    if shard_group_size % (fsdp.ranks_after_forward or 1) == 0:
        return fsdp
    return replace(fsdp, reshard_after_forward=shard_group_size // 2 if shard_group_size > 3 else False)


def compare_results(
    proof: RunConfig, expected: StepResults, results: list[StepResults], note: str
) -> tuple[str, bool, str]:
    """Compares the results of the ranks with the single process: (claim, passed, measured)."""
    layout, batch = validate(proof)
    tolerance = TOLERANCE[proof.precision.compute]  # type: ignore[index]
    weights = "tied weights" if proof.model.tie else "untied weights"
    weights += ", packed documents" if proof.model.separator is not None else ""
    claim = (
        f"{layout}{describe_settings(proof)}, {batch.accumulation} micro-batches per step: equals a single process "
        f"({proof.precision.compute}, {weights})"
    )
    discrepancy, max_error = find_first_discrepancy(expected, results, layout, batch.accumulation, tolerance)
    quantities = f"loss, {len(expected.gradients)} gradients, gradient norm, {len(expected.losses)} steps, evaluation"
    measured = (
        f"{quantities}: largest relative error {max_error:.1e} (tolerance {tolerance.later_steps:g})"
        if discrepancy is None
        else str(discrepancy)
    )
    return claim, discrepancy is None, measured + note


def describe_settings(config: RunConfig) -> str:
    """The settings that the degrees of a layout do not show, in parentheses."""
    settings: list[str] = [f"sharded {config.layout.shard}"] if config.layout.shard != "none" else []
    if config.layout.pipeline > 1:
        stages = stages_per_rank(config)
        settings.append(config.pipeline.schedule + (f", {stages} stages per rank" if stages > 1 else ""))
    if config.layout.context > 1:
        settings.append(f"context parallelism by {config.context.method}")
    if config.activation_checkpoint.mode != "none":
        segment = config.activation_checkpoint.segment
        blocks = f" in segments of {segment} blocks" if segment > 1 else ""
        settings.append(f"activation checkpointing {config.activation_checkpoint.mode}{blocks}")
    settings += ["compiled"] if config.compile.enabled else []
    settings += ["optimizer state on CPU"] if config.optimizer.cpu_offload else []
    return f" ({', '.join(settings)})" if settings else ""
