"""The plan behind a run, from its records: its estimate, and the alternatives that the planner ranks. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.base.config import RunConfig, config_from_dict
from meshwright.base.hardware.cluster import Cluster
from meshwright.base.hardware.cluster_file import cluster_from_table
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.run_prediction import stand_in_cluster
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.search import search
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.workload_args import workload_from_config

MAX_SEARCHED_RANKS = 4096
"""The largest run whose alternatives are searched: a report is made in seconds."""
ALTERNATIVES = 3
"""The alternatives that a report compares with the run."""


@dataclass(frozen=True)
class RunPlan:
    """What the planner knows about the layout of a run."""

    estimate: Estimate | None = None
    """the run as the planner estimates it; bytes alone count if the machine is unknown"""
    cluster: Cluster | None = None
    """the machine of the prediction, or None if it is unknown"""
    alternatives: tuple[Estimate, ...] = ()
    """the best other layouts on the same devices, fastest first"""
    position: int | None = None
    """the place of the run's layout in the ranking, from 1; None if it is not among the first"""
    reason: str = ""
    """why there are no alternatives"""


def config_of_run(settings: Mapping[str, Any]) -> RunConfig | None:
    """The config in run.toml, or None if it is missing or damaged."""
    try:
        return config_from_dict(dict(settings)) if settings else None
    except ConfigError:
        return None


def find_run_plan(config: RunConfig | None, plan: Mapping[str, Any], device: str) -> RunPlan:
    """Estimates the run of a config on the machine that plan.json describes; both are untrusted.

    Args:
        config: the settings of the run, or None if they are not known.
        plan: the content of plan.json.
        device: torch's name of the device, or `cpu`.
    """
    if config is None:
        return RunPlan(reason="run.toml is missing or damaged")
    if config.custom_model.class_ is not None or config.custom_model.model:
        return RunPlan(reason="the model is not built in: meshwright plan --model ranks the layouts of a custom model")
    ranks = Layout.from_config(config.layout).ranks
    if ranks > MAX_SEARCHED_RANKS:
        return RunPlan(reason=f"alternatives are ranked for up to {MAX_SEARCHED_RANKS:,} ranks")
    cluster = planned_cluster(plan, ranks)
    try:
        job = PlannedJob.from_config(config, cluster or stand_in_cluster(device))
        estimated = estimate(job)
        if cluster is None:
            return RunPlan(estimated, reason="no machine was measured (meshwright plan measure), so none are ranked")
        ranked = search(CostCache(workload_from_config(config, ()), cluster)).ranked
    except (ConfigError, ArithmeticError, ValueError) as error:
        return RunPlan(reason=f"the planner cannot estimate the run: {error}")
    keys = [Candidate.from_job(each.job).layout_key for each in ranked]
    own = Candidate.from_job(job).layout_key
    others = [each for each, key in zip(ranked, keys, strict=True) if key != own]
    position = keys.index(own) + 1 if own in keys else None
    reason = "" if others else "no other layout fits on these devices"
    return RunPlan(estimated, cluster, tuple(others[:ALTERNATIVES]), position, reason)


def planned_cluster(plan: Mapping[str, Any], ranks: int) -> Cluster | None:
    """The cluster in plan.json with as many devices as the run has ranks, or None if there is none."""
    table = plan.get("cluster_file")
    try:
        cluster = cluster_from_table(table, "recorded") if isinstance(table, dict) else None
    except ConfigError:
        return None
    return cluster.with_devices(ranks) if cluster is not None and ranks <= cluster.device_count else None
