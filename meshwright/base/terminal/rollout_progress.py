"""A run of reinforcement learning on the terminal: lines of its header, and fields of its progress. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.base.config import RunConfig
from meshwright.base.records.events import Event

SHORT_NAMES = {"reward": "reward", "kl": "kl", "entropy": "entropy", "staleness": "stale", "queue_depth": "queue"}
"""Metrics of a step that a line has, with their names there."""
OTHER_METRICS = ("reward_std", "completion_tokens", "mismatch", "rejected", "ratio", "approx_kl", "clip_share")
"""Metrics that only the records, the page and the report have."""
SYNCHRONY = {0: "synchronous", 1: "one step off"}


def rollout_header(config: RunConfig, start: Event) -> list[str]:
    """The lines of the header that take the place of `data` and `batch` where those count samples."""
    rl = config.rl
    groups = config.batch.global_ // rl.group_size
    size = f"{groups} groups x {rl.group_size} rollouts per step, up to {rl.completion_tokens} tokens each"
    most = config.batch.global_ * rl.completion_tokens
    steps = start["epoch_steps"] * rl.group_size  # a step consumes a prompt per group, and more if it leaves some out
    prompts = f"{', '.join(start['sources'])}: {start['samples']:,} prompts, {start['held_out']:,} held out"
    own = start.get("reward")
    reward = f"reward function {own}" if own else "the reward of the task"
    bound = f"staleness up to {rl.staleness} ({SYNCHRONY.get(rl.staleness, 'asynchronous')})"
    count = f"{rl.generators} generator{'' if rl.generators == 1 else 's'}"
    return [
        f"  data    {prompts}; at most {steps:,.0f} steps per epoch",
        f"  batch   {start['batch']} (up to {most:,} completion tokens per step)",
        f"  rollout {rl.objective}, task {rl.task}, level {rl.level}, {reward}: {size}",
        f"          {bound}, {count}, policy {rl.policy}, temperature {rl.temperature:g}, kl {rl.kl:g}",
    ]


def rollout_fields(step: Event, rollouts: Sequence[Event]) -> list[str]:
    """The short fields of a step that trains on rollouts, and the metrics of the user's.

    Args:
        step: the newest step record.
        rollouts: `rollouts` records of the newest steps, each with the seconds of its step under `step_seconds`.
    """
    metrics = step.get("metrics", {})
    fields = [f"{name} {format_metric(metrics[metric])}" for metric, name in SHORT_NAMES.items() if metric in metrics]
    own = [name for name in metrics if name not in SHORT_NAMES and name not in OTHER_METRICS]
    return [*fields, *idle_fields(rollouts), *(f"{name} {format_metric(metrics[name])}" for name in own)]


def idle_fields(rollouts: Sequence[Event]) -> list[str]:
    """The share of the time in which generators wait for the learner, and in which the learner waits for rollouts."""
    timed = [event for event in rollouts if event.get("step_seconds")]
    if not timed:
        return []
    newest, oldest = timed[-1], timed[0]
    waited = sum(event["wait_seconds"] for event in timed) / sum(event["step_seconds"] for event in timed)
    fields = []
    spent = newest["generator_seconds"] - oldest["generator_seconds"]
    idle = newest["generator_idle_seconds"] - oldest["generator_idle_seconds"]
    if spent <= 0 or idle < 0:  # one step, or a rollout service that has started again
        spent, idle = newest["generator_seconds"], newest["generator_idle_seconds"]
    if spent > 0:
        fields.append(f"generators idle {min(1.0, idle / spent):.0%}")
    return [*fields, f"learner waits {min(1.0, waited):.0%}"]


def format_metric(value: float | None) -> str:
    return "non-finite" if value is None else f"{value:.3g}"
