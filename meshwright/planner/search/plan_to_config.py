"""The run configuration that a plan decides: from the best plan of a search, or from a plan file.

Command-line options take precedence: they pin settings of the search, and override a plan file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.base.config import RunConfig, config_from_dict, config_to_dict, identity, placement
from meshwright.base.config.constraints import PositiveInt
from meshwright.base.config.reader import CommandLineValue, convert, read_toml, set_key
from meshwright.base.hardware.cluster import Cluster
from meshwright.base.hardware.resolve_cluster import resolve_cluster, with_whole_nodes
from meshwright.base.io import format_bytes, format_count, format_seconds, read_json
from meshwright.base.models.initial_model import load_run_config
from meshwright.base.records.untrusted_records import bounded_object, finite_number
from meshwright.base.topology.layout import Layout
from meshwright.errors import ConfigError
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import describe_plan
from meshwright.planner.search.candidate import Candidate, candidate_config
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.explanation.ladder import ddp_bottleneck, find_bottleneck
from meshwright.planner.search.explanation.suggestions import infeasible_error
from meshwright.planner.search.search import search
from meshwright.planner.workload.workload import SEARCHED_KEYS
from meshwright.planner.workload.workload_args import workload_from_config

BEST = "best"
PLAN_KEYS = (
    "layout.",
    "ddp.",
    "fsdp.",
    "pipeline.",
    "context.",
    "activation_checkpoint.",
    "compile.",
    "optimizer.cpu_offload",
    "planned_for",
)
"""The keys that a plan file decides in addition to batch.micro, if they are placement: what belongs to the identity
is taken from the run.
"""
WORKLOAD_KEYS = ("model.", "data.sequence", "batch.global", "precision.compute")
"""The keys that a plan is made for: they must match the run."""


@dataclass(frozen=True)
class PlannedConfig:
    """A run configuration, and one line about the plan behind it."""

    config: RunConfig
    message: str
    seconds: float | None
    """The predicted step time."""


def resolve_plan(
    plan: str,
    cluster: str | None,
    file: Path | None,
    overrides: Sequence[str],
    ranks: str | None,
    steps: str | None,
) -> PlannedConfig:
    """Returns the configuration for `--plan`, which is `best` or a plan file; the other arguments are those of
    `meshwright train`.
    """
    if plan == BEST:
        return best_plan(cluster or "here", file, overrides, ranks, steps)
    if not plan.endswith(".toml"):
        raise ConfigError(
            f"--plan {plan} is not a plan", "expected best, or a PLAN.toml that meshwright plan --out wrote"
        )
    return plan_from_file(Path(plan), file, overrides, ranks, steps)


def override_key(override: str) -> str:
    return override.removeprefix("--").partition("=")[0]


def best_plan(
    cluster: str, file: Path | None, overrides: Sequence[str], ranks: str | None, steps: str | None
) -> PlannedConfig:
    """Searches the best plan for a run.

    The plan uses the requested ranks, otherwise the ranks of the run file's layout, otherwise all devices.
    """
    run = load_run_config(
        file, [option for option in overrides if override_key(option) not in SEARCHED_KEYS], None, steps
    )
    devices = resolve_cluster(cluster)
    requested = parse_ranks(ranks) if ranks is not None else ranks_in_run_file(file)
    cache = CostCache(
        workload_from_config(run, overrides), cluster_with_ranks(devices, requested or devices.device_count)
    )
    ranked = search(cache).ranked
    if not ranked:
        raise infeasible_error(cache)
    best = ranked[0]
    config = candidate_config(cache.work.base_config or run, Candidate.from_job(best.job))
    config = replace(config, planned_for=cache.cluster.size_name)
    return PlannedConfig(config, reason(cache, best), best.seconds)


def parse_ranks(ranks: str) -> int:
    return int(convert(PositiveInt, CommandLineValue(ranks), "--ranks"))


def ranks_in_run_file(file: Path | None) -> int | None:
    """Returns the ranks of a run file's layout; None if the file has no layout."""
    if file is None or "layout" not in read_toml(file):
        return None
    return Layout.from_config(load_run_config(file).layout).ranks


def cluster_with_ranks(cluster: Cluster, ranks: int) -> Cluster:
    if ranks > cluster.device_count:
        raise ConfigError(
            f"{ranks} ranks on {cluster.device_count} devices of cluster {cluster.name!r}",
            f"expected 1 to {cluster.device_count}",
        )
    return with_whole_nodes(cluster, ranks)


def reason(cache: CostCache, plan: Estimate) -> str:
    """Describes the plan, the reason for it, and its prediction."""
    ddp, bottleneck = ddp_bottleneck(cache)
    is_ddp = Candidate.from_job(ddp.job).layout_key == Candidate.from_job(plan.job).layout_key
    why = f"bottleneck: {find_bottleneck(plan).message}" if is_ddp else f"bottleneck of DDP: {bottleneck.message}"
    return f"plan: {describe_plan(plan.job)}; {why}; predicted: {describe_prediction(plan)}"


def describe_prediction(plan: Estimate) -> str:
    interval = f"{format_seconds(plan.interval_low)} to {format_seconds(plan.interval_high)}"
    rate, memory = f"{format_count(plan.tokens_per_second)} tokens/s", format_bytes(plan.peak_memory.total)
    figures = f"{format_seconds(plan.seconds)} per step ({interval}), {rate}, {memory} per rank"
    return "; ".join([figures, *plan.notes])


def plan_from_file(
    path: Path, file: Path | None, overrides: Sequence[str], ranks: str | None, steps: str | None
) -> PlannedConfig:
    """Returns the run with the placement of a plan file; without a run file, the plan file itself is the run."""
    planned = load_run_config(path)
    plan_is_run = file is None and not any(override_key(option) == "preset" for option in overrides)
    run_overrides = [option for option in overrides if not decided_by_plan(override_key(option))]
    run = load_run_config(path if plan_is_run else file, run_overrides, None, steps)
    check_same_run(path, identity(planned), identity(run))
    tree: dict[str, Any] = config_to_dict(run)
    for key, value in placement(planned).items():
        if decided_by_plan(key):
            set_key(tree, key, value)
    for option in overrides:
        if decided_by_plan(override_key(option)):
            set_key(tree, override_key(option), CommandLineValue(option.partition("=")[2]))
    config = config_from_dict(tree)
    if ranks is not None:
        layout = config_to_dict(config.layout.with_ranks(parse_ranks(ranks)))
        config = config_from_dict(config_to_dict(config) | {"layout": layout})
    record = prediction_beside(path)
    seconds, cluster = finite_number(record.get("seconds")), str(record.get("cluster"))[:60]
    predicted = f"; predicted: {format_seconds(seconds)} per step on {cluster}" if seconds else ""
    return PlannedConfig(config, f"plan: {path}, {Layout.from_config(config.layout)}{predicted}", seconds)


def decided_by_plan(key: str) -> bool:
    return key.startswith(PLAN_KEYS) or key == "batch.micro"


def check_same_run(path: Path, planned: dict[str, Any], run: dict[str, Any]) -> None:
    for key, value in planned.items():
        if key.startswith(WORKLOAD_KEYS) and run.get(key) != value:
            raise ConfigError(
                f"--plan {path} is for another run: {key} = {value} in the plan, {run.get(key)} in the run",
                "try a plan made for this run, or --plan best",
            )


def prediction_beside(path: Path) -> dict[str, Any]:
    """Returns the prediction record in PLAN.json, or an empty dict if there is none."""
    try:
        return bounded_object(read_json(path.with_suffix(".json"), follow=True))
    except ConfigError:
        return {}
