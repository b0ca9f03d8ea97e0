"""The result of `meshwright plan`: the ranked plans, the ladder, the explanation and the scaling table."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from typing import Any

from meshwright.config import config_to_toml
from meshwright.errors import ConfigError
from meshwright.models.architecture import Architecture
from meshwright.planner.calibration.prediction import prediction_record
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.generation import GeneratorPlan, plan_generators
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.search.candidate import Candidate, candidate_config
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.explain import Explanation, explain
from meshwright.planner.search.ladder import LadderStep, build_ladder
from meshwright.planner.search.scaling import ScalingRow, ScalingTable, scaling_table
from meshwright.planner.search.search import MIN_RANKED, SearchResult, search
from meshwright.planner.search.suggestions import infeasible_error
from meshwright.planner.workload.traced_model import TracedModel
from meshwright.planner.workload.workload import Workload


@dataclass(frozen=True)
class PlanResult:
    workload: Workload
    cluster: Cluster
    search: SearchResult
    chosen: Estimate
    """The plan that is shown, explained and written."""
    position: int
    """The position of the chosen plan in the ranked list, from 1."""
    ladder: list[LadderStep]
    ladder_summary: str
    """A sentence that compares the last step of the ladder with the first plan of the list."""
    explanation: Explanation
    scaling: ScalingTable | None
    generators: GeneratorPlan | None = None
    """How many generators the learner of a run with rl.objective needs."""


def make_plan(
    workload: Workload,
    cluster: Cluster,
    position: int = 1,
    top: int = 8,
    scaling: bool = False,
    critical_batch: float | None = None,
    file: str = "PLAN.toml",
) -> PlanResult:
    """Plans a workload on all devices of a cluster; raises ConfigError with suggestions if no plan is feasible."""
    workload = workload.on(cluster)
    cache = CostCache(workload, cluster)
    result = search(cache, top=max(top, position, MIN_RANKED))
    ranked = result.ranked
    if not ranked:
        raise infeasible_error(cache)
    if not 1 <= position <= len(ranked):
        raise ConfigError(f"plan {position} does not exist: {len(ranked)} plans fit", f"expected 1 to {len(ranked)}")
    chosen = ranked[position - 1]
    steps, summary = build_ladder(cache, ranked[0])
    others = [other for other in ranked[: position + 2] if other is not chosen]
    explanation = explain(chosen, others, (steps[0].estimate, steps[0].bottleneck), cache, file)
    table = scaling_table(cache, chosen, critical_batch) if scaling else None
    config = workload.base_config
    generators = plan_generators(chosen.job, config.rl, chosen.seconds) if config and config.rl.enabled else None
    return PlanResult(workload, cluster, result, chosen, position, steps, summary, explanation, table, generators)


def plan_json(result: PlanResult, top: int) -> dict[str, Any]:
    """Returns the result as JSON; every plan in it is a prediction record."""
    work, cluster = result.workload, result.cluster
    return {
        "model": model_json(work.model),
        "cluster": json.loads(json.dumps(dataclasses.asdict(cluster))) | {"devices": cluster.device_count},
        "trainable": work.base_config is not None,
        "pinned": dict(work.pinned),
        "notes": list(work.notes),
        "position": result.position,
        "plan": prediction_record(result.chosen),
        "ranked": [prediction_record(plan) for plan in result.search.ranked[:top]],
        "pareto_front": [prediction_record(plan) for plan in result.search.pareto_front],
        "search": {
            "candidates_timed": result.search.timed,
            "memory_estimates": result.search.memory_estimates,
            "degrees": result.search.degrees,
            "degrees_skipped": result.search.degrees_skipped,
            "layouts": len(result.search.ranked),
        },
        "ladder": [
            {
                "name": step.name,
                "technique": step.technique,
                "bottleneck": dataclasses.asdict(step.bottleneck),
                "resolved": step.resolved,
                "cost": step.cost,
                "rejected": list(step.rejected),
                "plan": prediction_record(step.estimate),
            }
            for step in result.ladder
        ],
        "ladder_summary": result.ladder_summary,
        "explanation": dataclasses.asdict(result.explanation),
        "scaling": scaling_json(result.scaling) if result.scaling else None,
        "generators": result.generators.to_json() if result.generators else None,
    }


def model_json(model: Architecture | TracedModel) -> dict[str, Any]:
    sizes = model.to_json() if isinstance(model, TracedModel) else dataclasses.asdict(model)
    return sizes | {"parameters": model.parameters}


def scaling_json(table: ScalingTable) -> dict[str, Any]:
    def row_json(row: ScalingRow) -> dict[str, Any]:
        return {
            "factor": row.factor,
            "devices": row.devices,
            "batch": row.batch,
            "same_layout": row.same_layout,
            "efficiency": row.efficiency,
            "exposed_share": row.exposed_share,
            "useful_tokens_per_second": row.useful_tokens_per_second,
            "plan": prediction_record(row.estimate) if row.estimate else None,
        }

    return {
        "strong": [row_json(row) for row in table.strong],
        "weak": [row_json(row) for row in table.weak],
        "serial_fraction": table.serial_fraction,
        "critical_batch_tokens": table.critical_batch,
        "assumption": table.assumption,
    }


def plan_toml(result: PlanResult) -> str:
    """Returns the chosen plan as a run file that `meshwright train` accepts."""
    work = result.workload
    if work.base_config is None:
        reason = work.notes[0] if work.notes else "Meshwright's decoder cannot train this model"
        raise ConfigError(f"{work.model.name} cannot be written as a run file: {reason}", "try --json")
    config = candidate_config(work.base_config, Candidate.from_job(result.chosen.job))
    return config_to_toml(replace(config, planned_for=result.cluster.size_name))
