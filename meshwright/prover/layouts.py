"""A layout against one process: loss, every gradient, their norm, three optimizer steps and an evaluation, with unequal
masks, accumulation and weights both tied and not.
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
"""float64 leaves 1e6 roundings of room; float32 about 300, which sums in another order may use, and five times as many
after three steps."""

ACCUMULATION = 3
MICRO = 2


def check_layouts(config: RunConfig) -> Iterator[tuple[str, bool, str]]:
    proofs, note = proof_configs(config)
    # Both in processes of their own: autograd in this one would start CUDA, where there is one, and spoil the fork.
    [expected] = run_ranks(run_single_process, 1, proofs, launch=proofs[0].launch)
    layout = Layout.from_config(proofs[0].layout)
    found = run_ranks(run_parallel, layout.ranks, proofs, launch=proofs[0].launch, timeout=300.0)
    for index, proof in enumerate(proofs):
        yield compare_results(proof, expected[index], [trails[index] for trails in found], note)


def proof_configs(config: RunConfig) -> tuple[list[RunConfig], str]:
    """The proofs of one config: in both precisions, which take different paths in torch, and with weights tied and
    not.
    """
    spread, fewer = scale_layout(config.layout)
    layout = Layout.from_config(spread)
    config = replace(config, pipeline=limit_stages(config))
    model, scaled = scale_model(config, layout)
    model = replace(model, capacity_factor=0.0)
    accumulation = accumulation_steps(config, layout)
    proof = replace(
        proof_settings(config),
        model=model,
        layout=spread,
        data=replace(config.data, sequence=scale_sequence(config, layout, SEQUENCE)),
        batch=replace(config.batch, global_=layout.data_degree * accumulation * MICRO, micro=MICRO),
        fsdp=fit_reshard_degree(config.fsdp, min_shard_group_size(layout)),
    )
    said = [f"layout {fewer}" if fewer else "", f"model {scaled}" if scaled else ""]
    note = "; on CPU" + "".join(f", {text}" for text in said if text)
    if config.ddp.comm_hook != "none":
        note += f", without ddp.comm_hook = {config.ddp.comm_hook}, which rounds"
    if config.model.capacity_factor:
        note += ", without model.capacity_factor, which makes results depend on the layout"
    if config.precision.compute not in TOLERANCE:
        note += f", not in {config.precision.compute}, which rounds"
    separator = 0 if model.separator is None and layout.context > 1 else model.separator
    other = replace(model, tie=not model.tie, separator=separator)
    compute = {name: replace(config.precision, compute=name) for name in TOLERANCE}
    return [
        replace(proof, precision=compute["fp64"]),
        replace(proof, precision=compute["fp32"]),
        replace(proof, precision=compute["fp64"], model=other),
    ], note


def limit_stages(config: RunConfig) -> PipelineConfig:
    usual = SCHEDULES[config.pipeline.schedule].default_stages
    return replace(config.pipeline, stages=min(config.pipeline.stages or usual, usual))


def accumulation_steps(config: RunConfig, layout: Layout) -> int:
    """As many as a schedule can do with, and more than one. DDP's static graph cannot skip a synchronisation in its
    first pass: such a config never accumulates.
    """
    if layout.pipeline == 1:
        return 1 if config.ddp.static_graph else ACCUMULATION
    kind, ranks = config.pipeline.schedule, layout.pipeline
    least = max(ACCUMULATION, SCHEDULES[kind].min_micro_batches(ranks))
    return next(m for m in count(least) if m % max(1, m // ranks) == 0)


def fit_reshard_degree(fsdp: FSDPConfig, shard: int) -> FSDPConfig:
    """`fsdp.reshard_after_forward` on fewer ranks: unchanged if it divides them, else half of them."""
    if shard % (fsdp.ranks_after_forward or 1) == 0:
        return fsdp
    return replace(fsdp, reshard_after_forward=shard // 2 if shard > 3 else False)


def compare_results(
    proof: RunConfig, expected: StepResults, found: list[StepResults], note: str
) -> tuple[str, bool, str]:
    layout, batch = validate(proof)
    tolerance = TOLERANCE[proof.precision.compute]  # type: ignore[index]
    tied = ("tied" if proof.model.tie else "untied") + (", documents" if proof.model.separator is not None else "")
    promise = (
        f"{layout}{describe_settings(proof)}, accumulation {batch.accumulation} = one process "
        f"({proof.precision.compute}, {tied})"
    )
    off, worst = find_first_discrepancy(expected, found, layout, batch.accumulation, tolerance)
    what = f"loss, {len(expected.gradients)} gradients, norm, {len(expected.losses)} steps, evaluation"
    measured = f"{what}: worst {worst:.1e} (allowed {tolerance.later:g})" if off is None else str(off)
    return promise, off is None, measured + note


def describe_settings(config: RunConfig) -> str:
    """What a layout's degrees do not say."""
    said: list[str] = [config.layout.shard] if config.layout.shard != "none" else []
    if config.layout.pipeline > 1:
        each = stages_per_rank(config)
        said.append(config.pipeline.schedule + (f", {each} stages a rank" if each > 1 else ""))
    if config.layout.context > 1:
        said.append(f"context by {config.context.method}")
    if config.activation_checkpoint.mode != "none":
        segment = f" by {config.activation_checkpoint.segment}" if config.activation_checkpoint.segment > 1 else ""
        said.append(f"recompute {config.activation_checkpoint.mode}{segment}")
    said += ["compiled"] if config.compile.enabled else []
    said += ["optimizer offloaded"] if config.optimizer.cpu_offload else []
    return f" ({', '.join(said)})" if said else ""
