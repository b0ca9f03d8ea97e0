"""The proof runs of a config: as configured, in float64, with other shapes, at the real sequence length, and resumed on
another layout. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.base.config import BatchConfig, LayoutConfig, NumericsConfig, RunConfig
from meshwright.base.config.fingerprint import flatten
from meshwright.base.topology.layout import Layout, stages_per_rank
from meshwright.base.topology.unsupported import validate
from meshwright.errors import ConfigError
from meshwright.prover.shrink.layouts import (
    layouts_after_resume,
    layouts_with_degree_three,
    small_layouts,
)
from meshwright.prover.shrink.sizes import (
    CADENCE,
    SMALL,
    UNLIMITED,
    Limits,
    fit_accumulation,
    fit_reshard_degree,
    min_blocks,
    shrink,
    small_batch,
    user_accumulation,
)

MAX_SEQUENCE = 16_384
"""The longest sequence that is proven by default."""
MAX_RANKS_AT_SIZE = 4
"""The most ranks of runs with long sequences, many tokens or wide blocks."""
VARIATION = Limits(kv_heads=8, steps=6)
"""More key-value heads than in the other runs; two steps of warm-up and four of decay, in which every shape of the
schedule differs from the others.
"""
REAL_COUNTS = Limits(
    vocab=70_000, ffn=32, kv_heads=1, heads=2, width=8, head_size=4, experts=64, micro=8, sequence=16, steps=3
)
"""As many tokens, experts, samples per micro-batch and evaluated samples as the user's, in a narrow model. There are
more rows of the vocabulary than 16 bits can count.
"""
MAX_EVALUATED_SAMPLES = 64
LONG_SEQUENCE = Limits(kv_heads=1, heads=2, width=16, head_size=8, ffn=16, micro=1, sequence=MAX_SEQUENCE, steps=1)
DEVICE = Limits(vocab=512, ffn=256, kv_heads=4, heads=8, width=256, head_size=64, sequence=128)
"""Sizes at which a device runs the kernels of large models."""
DEVICE_BLOCKS = 4
ACCUMULATION = 3
LAST_STEPS = 3
NEVER_CLIPPED = 1000.0
"""A clip norm that no step exceeds; the variation has one that every step exceeds."""
HELD_OUT = 0.05
"""The fraction that variation and recovery runs hold out for evaluation if the user's config holds out nothing."""


@dataclass(frozen=True)
class ProofRun:
    """A run that is compared with the reference."""

    name: str
    config: RunConfig
    """what runs"""
    changes: tuple[str, ...]
    """every setting that differs from the user's: "model.width 4096 to 64\""""
    resume_layout: RunConfig | None = None
    """if set, the run of `config` is continued from its middle checkpoint with these settings"""
    masked_labels: bool = False
    """whether the labels of each sample are masked after a random length, so that ranks have different numbers of valid
    tokens
    """
    nonfinite: bool = False
    """whether the loss of a step is made NaN, so that its update is skipped"""
    first_step: int = 0
    """the first step that runs"""


def proof_runs(config: RunConfig, full: bool = False, devices: int = 0) -> list[ProofRun]:
    """The proof runs of a valid config on a machine with this number of CUDA devices that the config uses. With `full`,
    only the number of steps and the cadences shrink, and layouts of more than eight ranks.
    """
    limits = UNLIMITED if full else SMALL
    layouts = small_layouts(config.layout)
    configured = [shrink(config, layout, limits) for layout in layouts]
    if not devices:  # a config for CUDA is proven on CPU
        configured = [replace(run, launch=replace(run.launch, device="cpu")) for run in configured]
    float64 = [as_float64(run) for run in configured]
    if config.precision.compute == "fp16":
        configured = [with_changing_loss_scale(shrink(config, layout, replace(limits, steps=5))) for layout in layouts]
    if config.precision.compute == "fp64" and not devices:
        float64 = [replace(proof, count_bytes_every=limits.steps) for proof in float64]
        runs = named_runs(config, "as configured", float64)
    else:
        runs = named_runs(config, "as configured", configured)
        if devices:  # ranks share devices if there are fewer
            on_device = [for_device(config, layout, full) for layout in small_layouts(config.layout, MAX_RANKS_AT_SIZE)]
            runs += named_runs(config, "on the device", on_device)
        runs += named_runs(config, "float64", float64)
    runs += named_runs(config, "variation", variations(config), masked_labels=True, nonfinite=True)
    runs += last_steps(config)
    if config.data.sequence > configured[0].data.sequence:
        long_sequence = at_full_length(config, full)
        runs.append(ProofRun("long sequence", long_sequence, changes(config, long_sequence)))
    runs += resumed_on_another_layout(config, float64[0])
    return runs


def named_runs(
    config: RunConfig, name: str, proofs: Iterable[RunConfig], masked_labels: bool = False, nonfinite: bool = False
) -> list[ProofRun]:
    """The first run has the name, the others the name and their layout."""
    return [
        ProofRun(
            name if index == 0 else f"{name} on {Layout.from_config(proof.layout)}",
            proof,
            changes(config, proof),
            masked_labels=masked_labels,
            nonfinite=nonfinite,
        )
        for index, proof in enumerate(proofs)
    ]


def for_device(config: RunConfig, layout_config: LayoutConfig, full: bool) -> RunConfig:
    """The run with few blocks, and sizes that need the kernels of large models."""
    if full:
        return shrink(config, layout_config, UNLIMITED)
    layout = Layout.from_config(layout_config)
    proof = shrink(config, layout_config, DEVICE)
    blocks = max(min_blocks(config, layout), min(DEVICE_BLOCKS, config.model.layers))
    return replace(proof, model=replace(proof.model, layers=blocks))


def with_changing_loss_scale(config: RunConfig) -> RunConfig:
    """The run with a loss scale that doubles after two finite steps. It halves in a step that is not finite, which is
    skipped.
    """
    return replace(
        config,
        precision=replace(config.precision, scale_interval=min(config.precision.scale_interval, 2)),
        numerics=skipping(config.numerics),
    )


def skipping(numerics: NumericsConfig) -> NumericsConfig:
    return replace(numerics, on_nonfinite="skip", skip_budget=max(numerics.skip_budget, 1))


def as_float64(config: RunConfig) -> RunConfig:
    """The same run in float64 on CPU, whose rounding hides no error, and without gradient compression, which rounds. It
    always saves checkpoints, and counts no bytes, which is slow.
    """
    mode = "sync" if config.checkpoint.mode == "off" else config.checkpoint.mode
    return replace(
        config,
        precision=replace(config.precision, compute="fp64", float8=False),
        launch=replace(config.launch, device="cpu"),
        ddp=replace(config.ddp, comm_hook="none"),
        checkpoint=replace(config.checkpoint, mode=mode),
        count_bytes_every=0,
    )


def variations(config: RunConfig) -> list[RunConfig]:
    """What the user's shapes do not exercise: an axis of degree three, uneven pipeline stages, another number of
    micro-batches, tied weights if they are untied and the reverse, documents, an epsilon so large that AdamW depends on
    the scale of the gradient, a clip norm that is exceeded in every step, and updates that are skipped.

    A layout of three axes or more is varied with degree two on three axes, and with degree three on two of them.
    """
    with_three = next(
        (proof for layout in layouts_with_degree_three(config.layout) if is_valid(proof := vary(config, layout))), None
    )
    if with_three is None:
        return []
    axes = Layout.from_config(config.layout).active_mesh_axes
    if len(axes) < 3:
        return [with_three]
    return [vary(config, small_layouts(config.layout)[0]), with_three]


def vary(config: RunConfig, layout_config: LayoutConfig) -> RunConfig:
    layout = Layout.from_config(layout_config)
    proof = as_float64(shrink(config, layout_config, VARIATION))
    wanted = 1 if user_accumulation(config) == ACCUMULATION else ACCUMULATION
    accumulation = fit_accumulation(config, layout, wanted)
    model, evaluation = proof.model, proof.eval
    return replace(
        proof,
        model=replace(
            model,
            layers=2 * layout.pipeline * stages_per_rank(config) + 1 if layout.pipeline > 1 else 3,
            tie=not model.tie,
            separator=0 if model.separator is None else model.separator,
        ),
        batch=BatchConfig(layout.data_degree * accumulation * 2, 2),
        optimizer=replace(config.optimizer, eps=1e-4, clip=0.1, weight_decay=0.1),
        numerics=skipping(proof.numerics),
        eval=replace(evaluation, every=CADENCE, holdout=evaluation.holdout or HELD_OUT),
    )


def last_steps(config: RunConfig) -> list[ProofRun]:
    """The last steps of the user's own run, at their positions of the stream and of the learning-rate schedule, with
    the user's numbers of tokens, experts and samples. None if the run is as short and as small as other proof runs.
    """
    layout_config = small_layouts(config.layout, MAX_RANKS_AT_SIZE)[0]
    small = shrink(config, layout_config)
    proof = as_float64(shrink(config, layout_config, REAL_COUNTS))
    layout = Layout.from_config(layout_config)
    proof = replace(
        proof,
        steps=config.steps or proof.steps,
        schedule=config.schedule,
        model=replace(proof.model, layers=max(min_blocks(config, layout), min(2, config.model.layers))),
        batch=small_batch(config, layout, fit_accumulation(config, layout, 2), REAL_COUNTS.micro),
        eval=replace(proof.eval, samples=evaluated_samples(config, layout)),
    )
    if proof.steps <= small.steps and counts(proof) <= counts(small):
        return []
    first_step = max(0, proof.steps - LAST_STEPS)
    return [ProofRun("last steps", proof, changes(config, proof), first_step=first_step)]


def evaluated_samples(config: RunConfig, layout: Layout) -> int:
    """As many as the user's, up to a limit, and no multiple of the data-parallel degree."""
    samples = min(config.eval.samples, MAX_EVALUATED_SAMPLES)
    return samples + 1 if layout.data_degree > 1 and samples % layout.data_degree == 0 else samples


def counts(config: RunConfig) -> tuple[int, int]:
    """The sizes of which the last steps have as many as the user's."""
    return config.model.vocab, config.model.experts


def at_full_length(config: RunConfig, full: bool) -> RunConfig:
    """One step with the user's sequence length, of as few blocks, heads and samples as the layout allows."""
    limits = replace(LONG_SEQUENCE, sequence=config.data.sequence) if full else LONG_SEQUENCE
    layout_config = small_layouts(config.layout, MAX_RANKS_AT_SIZE)[0]
    layout = Layout.from_config(layout_config)
    proof = as_float64(shrink(config, layout_config, limits))
    return replace(
        proof,
        model=replace(proof.model, layers=max(min_blocks(config, layout), min(2, config.model.layers))),
        batch=small_batch(config, layout, fit_accumulation(config, layout, 1), limits.micro),
        eval=replace(proof.eval, every=0),
        checkpoint=replace(proof.checkpoint, mode="off"),
        optimizer=replace(proof.optimizer, clip=NEVER_CLIPPED if proof.optimizer.clip else 0.0),
    )


def resumed_on_another_layout(config: RunConfig, proof: RunConfig) -> list[ProofRun]:
    """The run and the settings with which it continues from its middle checkpoint: another layout, the same identity.
    None if tokens are dropped, which makes results depend on the layout.
    """
    if proof.steps <= CADENCE or (proof.model.experts and proof.model.capacity_factor):
        return []
    for layout_config in layouts_after_resume(proof.layout):
        resumed = place(proof, layout_config)
        if resumed is not None:
            return [ProofRun("another layout", proof, changes(config, proof), resume_layout=resumed)]
    return []


def place(config: RunConfig, layout_config: LayoutConfig, own_model: bool = False) -> RunConfig | None:
    """The same run on another layout, in as few micro-batches as possible; None if the layout does not support it."""
    layout = Layout.from_config(layout_config)
    local, remainder = divmod(config.batch.global_, layout.data_degree)
    if remainder:
        return None
    for micro in (m for m in range(local, 0, -1) if local % m == 0):
        resumed = replace(
            config,
            layout=layout_config,
            batch=replace(config.batch, micro=micro),
            fsdp=fit_reshard_degree(config.fsdp, layout),
            ddp=replace(config.ddp, static_graph=False),
        )
        if is_valid(resumed, own_model):
            return resumed
    return None


def is_valid(config: RunConfig, own_model: bool = False) -> bool:
    try:
        validate(config, own_model)
    except ConfigError:
        return False
    return True


def changes(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    """Every setting that differs: "model.width 4096 to 64"."""
    values = {key: value for key, value, _ in flatten(after)}
    return tuple(
        f"{key} {as_text(value)} to {as_text(values[key])}"
        for key, value, _ in flatten(before)
        if values[key] != value or type(values[key]) is not type(value)
    )


def as_text(value: Any) -> str:
    """A value as a run file writes it, without quotes."""
    return "unset" if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)
