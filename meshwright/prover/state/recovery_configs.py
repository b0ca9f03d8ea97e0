"""The configs that the recovery check runs: the user's settings, with small sizes and frequent saves. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from meshwright.base.config import LayoutConfig, RunConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.errors import ConfigError
from meshwright.prover.shrink.custom_runs import shrink_custom
from meshwright.prover.shrink.layouts import small_layouts
from meshwright.prover.shrink.runs import HELD_OUT, place
from meshwright.prover.shrink.sizes import fit_accumulation, min_blocks, shrink, small_batch, user_accumulation

MAX_RANKS = 4
MAX_KILLED_RANKS = 2
"""The most ranks of the run that is killed, whose ranks start many times."""
MAX_BLOCKS = 16
"""The most blocks of the run that is resharded: more than ten, so that their order by number and by name differ."""
MAX_ACCUMULATION = 2
"""The most micro-batches per step where the pipeline schedule needs no more."""
EVALUATE_EVERY = 2
HANG_TIMEOUT = 20.0
"""Seconds without progress after which a rank of a proof run hangs."""


def kill_config(config: RunConfig, steps: int, own_model: bool = False) -> RunConfig:
    """The config of the run that is killed, with few blocks, in the user's checkpoint mode."""
    mode = config.checkpoint.mode
    saves: Literal["async", "sync"] = "sync" if mode == "off" else mode
    if own_model:
        return own_model_config(config, steps, saves, MAX_KILLED_RANKS, keep=8)
    return recovery_config(config, steps, saves, MAX_KILLED_RANKS, blocks=2, keep=8)


def with_real_blocks(config: RunConfig, steps: int, own_model: bool = False) -> RunConfig:
    """The config of the run that is resharded, with the user's number of blocks and a checkpoint after every step."""
    if own_model:
        return own_model_config(config, steps, "sync", MAX_RANKS, keep=steps)
    return recovery_config(config, steps, "sync", MAX_RANKS, blocks=MAX_BLOCKS, keep=steps)


def own_model_config(
    config: RunConfig, steps: int, mode: Literal["async", "sync"], max_ranks: int, keep: int
) -> RunConfig:
    """The config of a user's model, which stays as it is, with a checkpoint after every step. Its samples are all
    decoded: a sample whose targets are no integers cannot be masked.
    """
    layout_config = small_layouts(config.layout, max_ranks)[0]
    layout = Layout.from_config(layout_config)
    accumulation = fit_accumulation(config, layout, min(user_accumulation(config), MAX_ACCUMULATION))
    proof = replace(shrink_custom(config, layout_config), batch=small_batch(config, layout, accumulation, limit=2))
    proof = with_saves(config, proof, steps, mode, keep)
    validate(proof, own_model=True)
    return proof


def recovery_config(
    config: RunConfig, steps: int, mode: Literal["async", "sync"], max_ranks: int, blocks: int, keep: int
) -> RunConfig:
    """The config with small sizes, at most so many blocks, and a checkpoint after every step. Samples that cannot be
    decoded are quarantined and steps that are not finite are skipped, so that the counters are not trivial.
    """
    layout_config = small_layouts(config.layout, max_ranks)[0]
    layout = Layout.from_config(layout_config)
    proof = shrink(config, layout_config)
    accumulation = fit_accumulation(config, layout, min(user_accumulation(config), MAX_ACCUMULATION))
    proof = replace(
        proof,
        model=replace(proof.model, layers=max(min_blocks(config, layout), min(config.model.layers, blocks))),
        data=replace(
            proof.data, on_bad_sample="quarantine", bad_sample_budget=max(1000, config.data.bad_sample_budget)
        ),
        batch=small_batch(config, layout, accumulation, limit=2),
    )
    proof = with_saves(config, proof, steps, mode, keep)
    validate(proof)
    return proof


def with_saves(config: RunConfig, proof: RunConfig, steps: int, mode: Literal["async", "sync"], keep: int) -> RunConfig:
    """The run with this number of steps, a checkpoint after each, and skipped steps; an attempt is not restarted."""
    return replace(
        proof,
        steps=steps,
        numerics=replace(proof.numerics, on_nonfinite="skip", skip_budget=max(2, config.numerics.skip_budget)),
        eval=replace(proof.eval, every=EVALUATE_EVERY, holdout=proof.eval.holdout or HELD_OUT),
        checkpoint=replace(proof.checkpoint, mode=mode, every=1, keep=keep, keep_every=0),
        launch=replace(
            config.launch, device="cpu", restarts=0, hang_timeout=min(config.launch.hang_timeout, HANG_TIMEOUT)
        ),
    )


def another_layout(config: RunConfig, own_model: bool = False) -> RunConfig:
    """The same run on another layout, one that shards tensors along as many dimensions as the model allows. A user's
    own model keeps to the degrees that the user's layout has, apart from data parallelism.
    """
    here = Layout.from_config(config.layout)
    for layout_config in other_layouts(config.layout):
        layout = Layout.from_config(layout_config)
        if own_model and any(getattr(layout, axis) not in (1, getattr(here, axis)) for axis in ("tensor", "pipeline")):
            continue
        moved = place(config, layout_config, own_model)
        if moved is not None and sharded_axes(layout) != sharded_axes(here):
            return moved
    raise ConfigError("the model of this config runs on no other layout", "expected a model that FSDP2 can shard")


def sharded_axes(layout: Layout) -> list[bool]:
    return [degree > 1 for degree in (layout.tensor, layout.pipeline, layout.shard, layout.expert)]


def other_layouts(layout: LayoutConfig) -> Iterator[LayoutConfig]:
    """Candidates, those that shard tensors along most dimensions first."""
    single = replace(layout, replicate=1, shard="none", shard_degree=None, tensor=1, pipeline=1, context=1, expert=1)
    sharded = replace(single, replicate=2, shard="parameters")
    yield replace(sharded, tensor=2)
    yield replace(sharded, pipeline=2)
    yield replace(sharded, replicate=3)
    yield sharded
    yield single
    yield replace(single, replicate=2)
