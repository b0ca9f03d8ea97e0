"""Diagnoses a run from its history: every class of causes, the most important finding first. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from meshwright.base.history.run_history import RunHistory
from meshwright.insight.diagnose.finding import BROKEN, CONFIDENCE_WEIGHTS, Change, Finding, MeasuredFigure
from meshwright.insight.diagnose.run import crashes, hangs, numerics, replayed_samples
from meshwright.insight.diagnose.run.step_time import (
    bubble,
    checkpoint_stall,
    communication,
    data_wait,
    device_use,
    expert_loads,
    memory_thrash,
    profiled_steps,
    rollout_wait,
    stragglers,
)
from meshwright.insight.diagnose.run.timed_steps import (
    LIMITING_SHARE,
    TimedSteps,
    config_error,
    custom_model_options,
    timed_steps,
)
from meshwright.insight.diagnose.run.unjudged import find_unjudged
from meshwright.planner.report.change_cost import with_costs

CLASSES: tuple[Callable[[RunHistory], Iterator[Finding]], ...] = (
    hangs.find,
    crashes.find,
    numerics.find,
    replayed_samples.find,
    stragglers.find,
    communication.find,
    bubble.find,
    data_wait.find,
    rollout_wait.find,
    expert_loads.find,
    checkpoint_stall.find,
    memory_thrash.find,
    device_use.find,
    profiled_steps.find,
)
"""Every class of causes: a generator of findings from the history of a run."""

BROKEN_VARIANTS = {("experts", "collapsed routing")}
"""Kinds of other classes that damage the trained model."""


def diagnose_run(history: RunHistory) -> list[Finding]:
    """The findings of a run, the most important first. A run without a problem has one finding: `healthy`, or `not
    judged` if the records do not show enough of its time.
    """
    steps = timed_steps(history)
    found = [finding for find in CLASSES for finding in find(history)]
    if steps is not None:
        found += find_unjudged(history, steps, found)
        found = [with_costs(finding, history, steps) for finding in found]
    return [complete_commands(one, history) for one in order_findings(found) or [without_problem(steps, history)]]


def complete_commands(finding: Finding, history: RunHistory) -> Finding:
    """The finding with the run folder in its commands, and with the options of a custom model where they are needed."""
    folder = str(history.folder.root)
    change = replace(finding.change, action=finding.change.action.replace("RUN", folder))
    needs_model = finding.check.startswith("meshwright replay") or finding.check.endswith("--try")
    options = custom_model_options(history) if needs_model else ""
    return replace(finding, change=change, check=f"{finding.check.replace('RUN', folder)} {options}".strip())


def order_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Broken before slow; broken ones by their class, slow ones and failures that the run survived by what the change
    can win back.
    """
    return sorted(findings, key=importance)


def importance(finding: Finding) -> tuple[int, float]:
    weight = -finding.share * CONFIDENCE_WEIGHTS[finding.confidence]
    if finding.cause in BROKEN and not finding.survived:
        return BROKEN.index(finding.cause), weight
    return len(BROKEN) + ((finding.cause, finding.variant) not in BROKEN_VARIANTS), weight


def without_problem(steps: TimedSteps | None, history: RunHistory) -> Finding:
    """The verdict on a run in which nothing was found."""
    if steps is None:
        refused = config_error(history)
        reason = f"run.toml cannot be read: {refused}" if refused else "there are too few steps to judge the step time"
        return Finding(
            "not judged",
            "no settings" if refused else "too few steps",
            f"not judged: {reason}; no problem is on record",
            0.0,
            "low",
            change=Change(action="repair run.toml" if refused else "run a few more steps"),
            check="meshwright diagnose RUN",
        )
    return Finding(
        "healthy",
        "",
        f"healthy: nothing costs more than {LIMITING_SHARE:.0%} of the step time that a setting would win back",
        0.0,
        "high" if len(steps.steps) >= 20 else "medium",
        evidence=(
            MeasuredFigure("step time", steps.duration, "s"),
            MeasuredFigure("exposed communication", steps.communication / steps.duration, "share"),
            MeasuredFigure("steps", float(len(steps.steps)), "count"),
        ),
        check="meshwright report RUN",
    )
