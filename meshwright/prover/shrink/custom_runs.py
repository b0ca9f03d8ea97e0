"""The proof runs of a custom model: the model stays as it is; steps, batch and cadences shrink. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from meshwright.base.config import BatchConfig, LayoutConfig, RunConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.prover.shrink.coverage import unproven_degrees, unproven_pairs
from meshwright.prover.shrink.layouts import layouts_after_resume, layouts_with_degree_three, small_layouts
from meshwright.prover.shrink.runs import (
    ACCUMULATION,
    HELD_OUT,
    ProofRun,
    as_float64,
    changes,
    is_valid,
    named_runs,
    place,
    skipping,
    with_changing_loss_scale,
)
from meshwright.prover.shrink.sizes import (
    CADENCE,
    FULL_ACCUMULATION,
    MAX_WORKERS,
    SMALL,
    fit_accumulation,
    fit_reshard_degree,
    small_batch,
    small_checkpoint,
    small_eval,
    small_launch,
    small_schedule,
    user_accumulation,
)

SMALL_BUCKETS_MB = 0.001
"""The size of DDP's buckets, so that also a small model has several."""
VARIATION_STEPS = 6
KEPT = ("tensor", "context", "pipeline", "expert")
"""Axes whose degree must divide something in the model: it stays the user's, or becomes one."""


def custom_runs(config: RunConfig, float64: bool, devices: int = 0) -> list[ProofRun]:
    """The proof runs on a machine with `devices` CUDA devices. `float64`: whether the model computes in float64."""
    layouts = small_layouts(config.layout)
    configured = [shrink_custom(config, layout) for layout in layouts]
    if not devices:  # ranks share devices if there are fewer
        configured = [replace(run, launch=replace(run.launch, device="cpu")) for run in configured]
    in_float64 = [as_float64(run) for run in configured] if float64 else []
    if config.precision.compute == "fp16":
        configured = [with_changing_loss_scale(replace(run, steps=min(config.steps or 5, 5))) for run in configured]
    if config.precision.compute == "fp64":
        in_float64 = [replace(run, count_bytes_every=SMALL.steps) for run in in_float64]
        runs = named_runs(config, "as configured", in_float64)
    else:
        runs = named_runs(config, "as configured", configured) + named_runs(config, "float64", in_float64)
    vary = as_float64 if float64 else lambda run: run
    varied = [vary(variation(config, layout)) for layout in data_variations(config.layout)]
    runs += named_runs(
        config, "variation", [run for run in varied if is_valid(run, own_model=True)][:1], nonfinite=True
    )
    return runs + resumed(config, (in_float64 or configured)[0])


def shrink_custom(config: RunConfig, layout_config: LayoutConfig) -> RunConfig:
    """The config on this layout with few steps, a small batch and short cadences."""
    layout = Layout.from_config(layout_config)
    accumulation = fit_accumulation(config, layout, min(user_accumulation(config), FULL_ACCUMULATION))
    return replace(
        config,
        steps=min(config.steps or SMALL.steps, SMALL.steps),
        layout=layout_config,
        data=replace(config.data, workers=min(config.data.workers, MAX_WORKERS)),
        batch=small_batch(config, layout, accumulation, SMALL.micro),
        schedule=small_schedule(config.schedule, SMALL.steps),
        numerics=replace(config.numerics, compare_every=min(config.numerics.compare_every, CADENCE)),
        eval=small_eval(config.eval, layout),
        checkpoint=small_checkpoint(config.checkpoint),
        fsdp=fit_reshard_degree(config.fsdp, layout),
        ddp=replace(config.ddp, bucket_cap_mb=min(config.ddp.bucket_cap_mb, SMALL_BUCKETS_MB)),
        count_bytes_every=SMALL.steps,
        launch=small_launch(config),
    )


def data_variations(config: LayoutConfig) -> list[LayoutConfig]:
    """Layouts in which a data axis has degree three; heads, blocks and experts of the model may not divide into three.
    The last one is the user's own.
    """
    user = Layout.from_config(config)
    with_three = [
        layout
        for layout in layouts_with_degree_three(config)
        if all(getattr(Layout.from_config(layout), axis) in (1, getattr(user, axis)) for axis in KEPT)
    ]
    return [*with_three, small_layouts(config)[0]]


def variation(config: RunConfig, layout_config: LayoutConfig) -> RunConfig:
    """Another number of micro-batches, a skipped step, a clip norm that is exceeded in every step, and an epsilon so
    large that AdamW depends on the scale of the gradient.
    """
    layout = Layout.from_config(layout_config)
    proof = shrink_custom(config, layout_config)
    accumulation = fit_accumulation(config, layout, 1 if user_accumulation(config) == ACCUMULATION else ACCUMULATION)
    return replace(
        proof,
        steps=VARIATION_STEPS,
        schedule=small_schedule(config.schedule, VARIATION_STEPS),
        batch=BatchConfig(layout.data_degree * accumulation * 2, 2),
        optimizer=replace(config.optimizer, eps=1e-4, clip=0.1, weight_decay=0.1),
        numerics=skipping(proof.numerics),
        eval=replace(proof.eval, every=CADENCE, holdout=proof.eval.holdout or HELD_OUT),
    )


def resumed(config: RunConfig, proof: RunConfig) -> list[ProofRun]:
    """The run that continues from its middle checkpoint on another layout: other data axes, or one rank."""
    user = Layout.from_config(proof.layout)
    if proof.steps <= CADENCE:
        return []
    for layout_config in layouts_after_resume(proof.layout):
        layout = Layout.from_config(layout_config)
        if all(getattr(layout, axis) in (1, getattr(user, axis)) for axis in KEPT):
            continued = place(proof, layout_config, own_model=True)
            if continued is not None:
                return [ProofRun("another layout", proof, changes(config, proof), resume_layout=continued)]
    return []


def custom_not_proven(config: RunConfig, runs: list[ProofRun], devices: int = 0) -> list[str]:
    """One sentence for everything that no run covers."""
    accumulation = max(validate(run.config, own_model=True)[1].accumulation for run in runs)
    many = user_accumulation(config) > accumulation
    return [
        *([] if devices or config.launch.device == "cpu" else ["the kernels of CUDA: this machine has no CUDA device"]),
        *unproven_degrees(config, runs),
        *unproven_pairs(config, runs),
        *([f"{user_accumulation(config)} micro-batches per step (proven with {accumulation})"] if many else []),
    ]
