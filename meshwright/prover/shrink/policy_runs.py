"""The configs that the checks of reinforcement learning run: the user's objective, with small sizes. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from meshwright.base.config import BatchConfig, RunConfig
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.unsupported import validate
from meshwright.prover.shrink.layouts import small_layouts
from meshwright.prover.shrink.runs import as_float64
from meshwright.prover.shrink.sizes import (
    fit_accumulation,
    min_blocks,
    round_up,
    shrink,
    small_sequence,
    user_accumulation,
)
from meshwright.rl.tasks.registry import find_task

MAX_BLOCKS = 2
MAX_RANKS = 4
MAX_KILLED_RANKS = 2
"""The most ranks of the run that is killed, whose ranks start many times."""
MAX_ACCUMULATION = 2
"""The most micro-batches per step where the pipeline schedule needs no more."""
MAX_GROUP = 4
MAX_COMPLETION = 6
MAX_STALENESS = 4
"""A step of a proof run waits for all groups that the bound permits."""
MIN_SEQUENCE_UNIT = 8
"""Rows of a matrix product have the same bits at every position of a micro-batch if this divides the sequence."""
KILLED_STEPS = 8
CHECKPOINT_EVERY = 2
"""Steps between the checkpoints of the run that is killed, so that a kill loses a policy that has generated."""
HANG_TIMEOUT = 60.0


def small_policy_run(config: RunConfig, max_ranks: int = MAX_RANKS) -> RunConfig:
    """The run on a small layout: model, prompts and groups shrink; objective, clipping, normalization, importance
    weights, dynamic sampling and the policy that generates stay. A micro-batch has the rollouts of one group.
    """
    layout_config = small_layouts(config.layout, max_ranks)[0]
    layout = Layout.from_config(layout_config)
    small, rl = shrink(config, layout_config), config.rl
    level = find_task(rl.task).levels[rl.level - 1]
    completion = max(level.answer + 1, min(rl.completion_tokens, MAX_COMPLETION))
    group = min(rl.group_size, MAX_GROUP)
    accumulation = fit_accumulation(config, layout, min(user_accumulation(config), MAX_ACCUMULATION))
    limit = round_up(level.prompt + completion, MIN_SEQUENCE_UNIT)
    proof = replace(
        small,
        steps=KILLED_STEPS,
        model=replace(small.model, layers=max(min_blocks(config, layout), min(config.model.layers, MAX_BLOCKS))),
        data=replace(small.data, sequence=small_sequence(config, layout, limit), workers=0),
        batch=BatchConfig(layout.data_degree * accumulation * group, group),
        rl=replace(
            rl,
            group_size=group,
            completion_tokens=completion,
            staleness=min(rl.staleness, MAX_STALENESS),
            generators=1,
        ),
        eval=replace(small.eval, every=0),
        count_bytes_every=0,
        launch=replace(small.launch, device="cpu", hang_timeout=min(small.launch.hang_timeout, HANG_TIMEOUT)),
    )
    validate(proof)
    return proof


def killed_policy_run(config: RunConfig, restarts: int) -> RunConfig:
    """The run that is killed: its rollouts are a function of the seed, and every second step has a checkpoint."""
    proof = small_policy_run(config, MAX_KILLED_RANKS)
    return replace(
        proof,
        rl=replace(proof.rl, policy="fixed"),
        checkpoint=replace(
            proof.checkpoint, mode="sync", every=CHECKPOINT_EVERY, seconds=0.0, keep=KILLED_STEPS, memory_every=0
        ),
        launch=replace(proof.launch, restarts=restarts),
    )


def scored_policy_run(config: RunConfig) -> RunConfig:
    """The run whose log-probabilities are compared: every rollout has the weights that train on it."""
    proof = small_policy_run(config)
    return replace(
        proof,
        steps=3,
        rl=replace(proof.rl, staleness=0),
        checkpoint=replace(proof.checkpoint, mode="off"),
    )


def objective_run(config: RunConfig) -> RunConfig:
    """The run whose gradient is compared with the reference, in float64."""
    return as_float64(small_policy_run(config))
