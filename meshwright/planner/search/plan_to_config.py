"""A run's settings as a plan decides them: the best that a search finds, or those of a plan file; torch-free.

Words of the command line come first: they pin what is searched, and win over a plan file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig, config_from_dict, config_to_dict, identity, load_config, placement
from meshwright.config.constraints import PositiveInt
from meshwright.config.reader import CommandLineValue, convert, read_toml, set_key
from meshwright.errors import ConfigError
from meshwright.io import format_bytes, format_count, format_seconds, read_json
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import describe_plan
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.hardware.resolve_cluster import resolve_cluster, with_whole_nodes
from meshwright.planner.search.candidate import Candidate, candidate_config
from meshwright.planner.search.ladder import best_with, find_bottleneck
from meshwright.planner.search.search import CostCache, search
from meshwright.planner.search.suggestions import infeasible_error
from meshwright.planner.workload.workload import SEARCHED_KEYS
from meshwright.planner.workload.workload_args import workload_from_config
from meshwright.telemetry.run_measurements import bounded_object, finite_number
from meshwright.topology.layout import Layout

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
)
"""What a plan file decides beside batch.micro, as far as it is placement: what changes the numbers is the run's own."""
WORKLOAD_KEYS = ("model.", "data.sequence", "batch.global", "precision.compute")
"""What a plan is made for."""


@dataclass(frozen=True)
class PlannedConfig:
    """The settings of a run, and one line on the plan behind them."""

    config: RunConfig
    message: str
    seconds: float | None
    """that the plan predicts of a step"""


def resolve_plan(
    plan_word: str,
    cluster: str | None,
    file: Path | None,
    overrides: Sequence[str],
    ranks: str | None,
    steps: str | None,
) -> PlannedConfig:
    """`plan_word` is `best` or a plan file; the rest as `meshwright train` is given it."""
    if plan_word == BEST:
        return best_plan(cluster or "here", file, overrides, ranks, steps)
    if not plan_word.endswith(".toml"):
        raise ConfigError(
            f"--plan {plan_word} is no plan", "allowed: best, or PLAN.toml as meshwright plan --out writes it"
        )
    return plan_from_file(Path(plan_word), file, overrides, ranks, steps)


def override_key(word: str) -> str:
    return word.removeprefix("--").partition("=")[0]


def best_plan(
    cluster: str, file: Path | None, overrides: Sequence[str], ranks: str | None, steps: str | None
) -> PlannedConfig:
    """The search's first plan for this run on so many of the cluster's devices: as many as are asked for, as a run
    file's layout has, or all.
    """
    run = load_config(file, [word for word in overrides if override_key(word) not in SEARCHED_KEYS], None, steps)
    whole = resolve_cluster(cluster)
    asked = convert(PositiveInt, CommandLineValue(ranks), "--ranks") if ranks is not None else ranks_in_run_file(file)
    desk = CostCache(workload_from_config(run, overrides), cluster_with_ranks(whole, asked or whole.device_count))
    found = search(desk).ranked
    if not found:
        raise infeasible_error(desk)
    return PlannedConfig(candidate_config(run, Candidate.of(found[0].job)), reason(desk, found[0]), found[0].seconds)


def ranks_in_run_file(file: Path | None) -> int | None:
    """Of a run file that has a layout."""
    if file is None or "layout" not in read_toml(file):
        return None
    return Layout.from_config(load_config(file).layout).ranks


def cluster_with_ranks(whole: Cluster, ranks: int) -> Cluster:
    if ranks > whole.device_count:
        raise ConfigError(
            f"{ranks} ranks on {whole.device_count} devices of cluster {whole.name!r}",
            f"allowed: 1 to {whole.device_count}",
        )
    return with_whole_nodes(whole, ranks)


def reason(desk: CostCache, found: Estimate) -> str:
    """Which plan, why, and what it predicts."""
    copies, binding = best_with(desk, ())
    simple = Candidate.of(copies.job).layout_key == Candidate.of(found.job).layout_key
    why = f"binds: {find_bottleneck(found).message}" if simple else f"whole copies alone (DDP): {binding.message}"
    return f"plan: {describe_plan(found.job)}; {why}; predicted: {predicted(found)}"


def predicted(found: Estimate) -> str:
    between = f"{format_seconds(found.interval_low)} to {format_seconds(found.interval_high)}"
    rate, held = f"{format_count(found.tokens_per_second)} tokens/s", format_bytes(found.peak_memory.total)
    return "; ".join([f"{format_seconds(found.seconds)} a step ({between}), {rate}, {held}", *found.notes])


def plan_from_file(
    path: Path, file: Path | None, overrides: Sequence[str], ranks: str | None, steps: str | None
) -> PlannedConfig:
    """Its placement, over the run's own. Without a run file the plan's own run is meant: it is a whole one."""
    planned = load_config(path)
    of_itself = file is None and not any(override_key(word) == "preset" for word in overrides)
    run = load_config(
        path if of_itself else file,
        [word for word in overrides if not decided_by_plan(override_key(word))],
        None,
        steps,
    )
    check_same_run(path, identity(planned), identity(run))
    tree: dict[str, Any] = config_to_dict(run)
    for key, value in placement(planned).items():
        if decided_by_plan(key):
            set_key(tree, key, value)
    for word in overrides:
        if decided_by_plan(override_key(word)):
            set_key(tree, override_key(word), CommandLineValue(word.partition("=")[2]))
    merged = config_from_dict(tree)
    if ranks is not None:
        merged = config_from_dict(
            config_to_dict(merged)
            | {
                "layout": config_to_dict(
                    merged.layout.with_ranks(convert(PositiveInt, CommandLineValue(ranks), "--ranks"))
                )
            }
        )
    figures = figures_beside_plan(path)
    takes, where = finite_number(figures.get("seconds")), str(figures.get("cluster"))[:60]
    told = f"; predicted: {format_seconds(takes)} a step on {where}" if takes else ""
    return PlannedConfig(merged, f"plan: {path}, {Layout.from_config(merged.layout)}{told}", takes)


def decided_by_plan(key: str) -> bool:
    return key.startswith(PLAN_KEYS) or key == "batch.micro"


def check_same_run(path: Path, planned: dict[str, Any], run: dict[str, Any]) -> None:
    for key, value in planned.items():
        if key.startswith(WORKLOAD_KEYS) and run.get(key) != value:
            raise ConfigError(
                f"--plan {path} is for another run: {key} = {value} there and {run.get(key)} here",
                "allowed: a plan made for this run, or --plan best",
            )


def figures_beside_plan(path: Path) -> dict[str, Any]:
    """PLAN.json, if it is there."""
    try:
        return bounded_object(read_json(path.with_suffix(".json")))
    except ConfigError:
        return {}
