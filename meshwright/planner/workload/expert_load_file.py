"""The load of experts that a plan counts with: a stated imbalance, or the loads that a finished run measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshwright.base.history.run_history import RunHistory
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import ConfigError
from meshwright.planner.workload.workload import Workload


def with_expert_load(work: Workload, load: str | float | Path) -> Workload:
    """Returns a workload with the load of its experts.

    Args:
        work: a workload of a model with experts.
        load: the load of the busiest expert-parallel rank as a multiple of the mean, or the folder of a run of the same
            number of experts, of which the newest recorded loads are used.

    Raises:
        ConfigError: the model has no experts, the number is out of range, or the run recorded no loads of such experts.
    """
    experts = work.model.experts
    if not experts:
        raise ConfigError("a load of experts is given for a model without experts", "try it without --expert-load")
    if not str(load).strip():
        raise ConfigError("the load of experts is empty", f"expected 1 to {experts}, or a run folder")
    try:
        imbalance = float(str(load))
    except ValueError:
        return replace(work, expert_loads=measured_loads(Path(str(load)), experts))
    if not 1 <= imbalance <= experts:
        raise ConfigError(f"expert load {str(load)[:24]} is out of range", f"expected 1 to {experts}, or a run folder")
    return replace(work, expert_imbalance=imbalance)


def measured_loads(folder: Path, experts: int) -> tuple[tuple[float, ...], ...]:
    """Returns the newest loads that a run recorded: a row of every block, with the tokens of each expert."""
    event = RunHistory(RunFolder(folder)).expert_loads
    rows = tuple(tuple(row) for row in event["loads"]) if event else ()
    if not rows:
        raise ConfigError(f"the run {folder} recorded no loads of experts", "expected a run of a model with experts")
    if len(rows[0]) != experts:
        raise ConfigError(
            f"the run {folder} has {len(rows[0])} experts, and the model {experts}", "expected equal ones"
        )
    return rows
