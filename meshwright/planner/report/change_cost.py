"""Predicts what a change of settings does to the step time of a run, and to its numbers. Torch-free."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

from meshwright.base.config import RunConfig, config_from_dict, config_to_dict, identity
from meshwright.base.config.reader import merge, without_none
from meshwright.base.history.run_history import RunHistory
from meshwright.base.topology.unsupported import validate
from meshwright.base.topology.unused_settings import unused_settings
from meshwright.errors import ConfigError
from meshwright.insight.diagnose.finding import BROKEN, Change, Finding
from meshwright.insight.diagnose.run.timed_steps import TimedSteps
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.run_prediction import find_cluster
from meshwright.planner.workload.planned_job import PlannedJob

UNCHANGED = 1e-3
"""A predicted ratio this close to 1 means that the planner does not model the setting."""


def change_settings(config: RunConfig, lines: tuple[str, ...]) -> RunConfig:
    """The config with lines of a run file, such as `data.workers = 2`. Raises ConfigError if they are not valid."""
    updates: dict[str, Any] = tomllib.loads("\n".join(lines))
    changed = config_from_dict(merge(without_none(config_to_dict(config)), updates))
    validate(changed, own_model=bool(changed.custom_model.class_))
    return changed


def changes_numbers(config: RunConfig, changed: RunConfig) -> bool:
    """Whether settings differ that change the numbers of a run."""
    return identity(config) != identity(changed)


def with_costs(finding: Finding, history: RunHistory, steps: TimedSteps) -> Finding:
    """A finding of slow steps with the predicted step time after its change; what breaks a run is not about time.
    Settings that the run cannot take, or that the planner predicts to be no faster, become advice.
    """
    change = finding.change
    if not change.settings:
        return finding
    try:
        changed = change_settings(steps.config, change.settings)
    except ConfigError:  # the change does not fit the rest of the settings
        action = change.action or f"try {', '.join(change.settings)} with a layout and batch that allow it"
        return replace(finding, change=Change(action=action))
    if changed == steps.config or len(unused_settings(changed)) > len(unused_settings(steps.config)):
        action = change.action or f"{', '.join(change.settings)} has no effect on this run"
        return replace(finding, change=Change(action=action))
    if change.predicted_seconds is not None or finding.cause in BROKEN or not finding.share:
        return finding
    planned = planned_ratio(history, steps, changed)
    if planned is not None and planned > 1 + UNCHANGED:
        advice = f"the planner predicts that {', '.join(change.settings)} takes {planned:.2f} times as long"
        return replace(finding, change=Change(action=f"{change.action}; {advice}" if change.action else advice))
    if planned is not None and planned < 1 - UNCHANGED:
        seconds, source = steps.duration * planned, "planner"
    else:
        seconds, source = steps.duration * (1 - finding.share), "measured share"
    return replace(finding, change=replace(change, predicted_seconds=seconds, predicted_by=source))


def planned_ratio(history: RunHistory, steps: TimedSteps, changed: RunConfig) -> float | None:
    """The planner's step time after the change, divided by that before it; None where the run has no prediction."""
    if not isinstance(history.plan.get("seconds"), float) or steps.config.custom_model.class_:
        return None
    jobs = []
    for config in (steps.config, changed):
        cluster, _ = find_cluster(config, str(steps.start.get("device")), None)
        if cluster is None or cluster.name != history.plan.get("cluster"):
            return None  # the prediction was made for another machine than this one
        jobs.append(PlannedJob.from_config(config, cluster))
    before, after = (estimate(job).seconds for job in jobs)
    return after / before if before > 0 else None
