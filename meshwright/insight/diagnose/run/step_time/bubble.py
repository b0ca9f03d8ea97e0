"""The pipeline bubble: too few micro-batches to fill the stages, or a stage with more work than others. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshwright.base.history.run_history import RunHistory
from meshwright.base.topology.layout import stages_per_rank
from meshwright.base.topology.schedule_timeline import bubble_formula, build_timeline
from meshwright.base.topology.schedules import find_schedule, validate_schedule
from meshwright.errors import ConfigError
from meshwright.insight.diagnose.finding import Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.step_time.stragglers import find_slow_stage, stage_costs, stage_seconds
from meshwright.insight.diagnose.run.timed_steps import LIMITING_SHARE, TimedSteps, timed_steps

FULL_PIPELINE = 4
"""Micro-batches per stage with which a pipeline is full enough."""


def find(history: RunHistory) -> Iterator[Finding]:
    steps = timed_steps(history)
    if steps is None or steps.layout.pipeline == 1:
        return
    if len(set(steps.stages)) == steps.layout.pipeline and find_slow_stage(steps) is None:
        yield from find_imbalance(steps)
    yield from find_fill_and_drain(steps)


def schedule_bubble(steps: TimedSteps, schedule: str, micro_batches: int, per_rank: int | None) -> float | None:
    """The idle share of a schedule with equal stages; None if it does not exist."""
    ranks, per_rank = steps.layout.pipeline, per_rank or find_schedule(schedule).default_stages
    try:
        validate_schedule(schedule, ranks, micro_batches, per_rank)
        closed = bubble_formula(schedule, ranks, micro_batches, per_rank)
        return float(closed[1] if closed else build_timeline(schedule, ranks, micro_batches, per_rank).bubble)
    except ConfigError:
        return None


def find_fill_and_drain(steps: TimedSteps) -> Iterator[Finding]:
    schedule, per_rank = steps.config.pipeline.schedule, stages_per_rank(steps.config)
    micro_batches, stages = steps.batch.accumulation, steps.layout.pipeline
    bubble = schedule_bubble(steps, schedule, micro_batches, per_rank)
    if bubble is None:
        return
    after, settings = best_change(steps, bubble)
    passes = 1 - float(np.median(steps.local_seconds("fetch", "copy", "update").max(axis=0))) / steps.duration
    win = passes * (1 - (1 - bubble) / (1 - after))  # a bubble is inside of the passes
    if win < LIMITING_SHARE or not settings:
        return
    idle = float(np.median(steps.exposed / steps.seconds))
    yield Finding(
        "bubble",
        "fill and drain",
        f"{micro_batches} micro-batches fill the {stages} pipeline stages for {1 - bubble:.0%} of the time: the rest "
        f"is fill and drain of the schedule {schedule}",
        win,
        "high" if idle > bubble / 2 else "medium",
        axis="pipeline",
        evidence=(
            MeasuredFigure(
                f"bubble of {schedule} with {micro_batches} micro-batches", bubble, "share", after, "the change"
            ),
            MeasuredFigure("share of the step in which ranks wait", idle, "share", bubble, "the schedule's bubble"),
        ),
        change=Change(settings),
        check="meshwright diagnose RUN --try",
    )


def best_change(steps: TimedSteps, bubble: float) -> tuple[float, tuple[str, ...]]:
    """The smallest bubble that smaller micro-batches, or without them another schedule, give; and the settings."""
    schedule, per_rank = steps.config.pipeline.schedule, stages_per_rank(steps.config)
    local = steps.batch.local
    for micro in range(steps.batch.micro - 1, 0, -1):
        if local % micro == 0 and (local // micro >= FULL_PIPELINE * steps.layout.pipeline or micro == 1):
            after = schedule_bubble(steps, schedule, local // micro, per_rank)
            if after is not None:
                return after, (f"batch.micro = {micro}",)
    best: tuple[float, tuple[str, ...]] = (bubble, ())
    if steps.config.model.layers >= 2 * steps.layout.pipeline:
        for other in ("interleaved", "zbv"):
            after = schedule_bubble(steps, other, steps.batch.accumulation, None)
            if after is not None and after < best[0]:
                best = (after, (f'pipeline.schedule = "{other}"',))
    return best


def find_imbalance(steps: TimedSteps) -> Iterator[Finding]:
    seconds, costs = stage_seconds(steps, "forward", "backward"), stage_costs(steps)
    stage, stages = int(np.argmax(seconds)), steps.layout.pipeline
    share = float(seconds[stage] - seconds.mean()) / steps.duration
    if share < LIMITING_SHARE or costs[stage] < 1.1 * costs.mean():
        return
    rank = steps.ranks[int(np.flatnonzero(steps.stages == stage)[0])]
    layout = steps.config.layout
    settings = ["layout.pipeline = 1", f"layout.replicate = {layout.replicate * stages}"]
    yield Finding(
        "bubble",
        "imbalance",
        f"pipeline stage {stage} (rank {rank}) has {costs[stage]:.0%} of the model's FLOPs and takes "
        f"{seconds[stage] / seconds.mean():.2f} times the mean of the stages: the other stages wait for it",
        share,
        "high" if share > 2 * LIMITING_SHARE else "medium",
        rank=rank,
        axis="pipeline",
        evidence=(
            MeasuredFigure(
                f"seconds of the passes, stage {stage}",
                float(seconds[stage]),
                "s",
                float(seconds.mean()),
                "the mean stage",
            ),
            MeasuredFigure(
                f"share of the FLOPs, stage {stage}", float(costs[stage]), "share", 1 / stages, "an even share"
            ),
        ),
        change=Change(
            tuple(settings),
            "choose a number of blocks that the stages divide evenly, with the embedding and the head counted",
        ),
        check="meshwright diagnose RUN --try",
    )
