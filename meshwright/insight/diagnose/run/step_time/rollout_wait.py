"""Reinforcement learning: the learner waits for rollouts, or its generators wait for the learner. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.base.history.run_history import RunHistory
from meshwright.insight.diagnose.finding import Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.timed_steps import timed_steps

MAJORITY = 0.5
"""A side that waits for a larger share of its time limits the run."""


def find(history: RunHistory) -> Iterator[Finding]:
    steps, recent = timed_steps(history), history.rollouts.table.recent()
    if steps is None or not len(recent):
        return
    rl = steps.config.rl
    learner, generators = recent.learner_idle_share, recent.generator_idle_share
    evidence = tuple(
        MeasuredFigure(name, value, unit)
        for name, value, unit in (
            ("time in which the learner waits for rollouts", learner, "share"),
            ("time in which generators wait for the learner", generators, "share"),
            ("generators", float(recent.column("generators")[-1]), "count"),
            ("staleness bound", float(rl.staleness), "count"),
        )
        if value is not None
    )
    if learner is not None and learner > MAJORITY:
        overlap = "" if rl.staleness else ", or rl.staleness = 1 in a new run, with which generation overlaps training"
        yield Finding(
            "rollouts",
            "learner waits",
            f"the learner waits {learner:.0%} of the step time for rollouts: generation is slower than training",
            learner / 2,  # what twice as many generators can win back
            "high",
            phase="fetch",
            evidence=evidence,
            change=Change(
                (f"rl.generators = {max(1, 2 * rl.generators)}",),
                f"start more generators{overlap}; more of them help if cores or devices are free",
            ),
            check="meshwright report RUN",
        )
    elif generators is not None and generators > MAJORITY and rl.generators > 1:
        yield Finding(
            "rollouts",
            "generators wait",
            f"generators wait {generators:.0%} of their time for the learner: training is slower than generation",
            0.0,
            "medium",
            evidence=evidence,
            change=Change(
                (f"rl.generators = {max(1, rl.generators // 2)}",), "fewer generators leave cores to the learner"
            ),
            check="meshwright report RUN",
        )
