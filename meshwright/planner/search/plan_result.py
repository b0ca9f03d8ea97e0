"""The result of `meshwright plan`: the ranked plans, the ladder, the explanation and the scaling table."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from meshwright.base.config import RunConfig, config_to_toml
from meshwright.base.hardware.cluster import Cluster, cluster_json
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.traced_model import TracedModel
from meshwright.errors import ConfigError
from meshwright.planner.calibration.corrections import corrections_for
from meshwright.planner.calibration.prediction import prediction_record
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.generation import GeneratorPlan, plan_generators
from meshwright.planner.search.candidate import Candidate, candidate_config
from meshwright.planner.search.choice import PlanFamily, memory_risk
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.explanation.baselines import Baseline, build_baselines
from meshwright.planner.search.explanation.explain import Explanation, exact_traffic, explain
from meshwright.planner.search.explanation.ladder import LadderStep, build_ladder
from meshwright.planner.search.explanation.suggestions import infeasible_error
from meshwright.planner.search.run_cost import RunCost, run_cost
from meshwright.planner.search.scaling import ScalingRow, ScalingTable, scaling_table
from meshwright.planner.search.search import MIN_RANKED, SearchResult, search
from meshwright.planner.search.settings import SettingChange, price_settings
from meshwright.planner.search.trainer_rules import flop_convention, mfu_with_masked_scores, trainer_mfu
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
    listed: list[PlanFamily]
    """The plans that are listed: the best one of each family, or every plan as a family of its own."""
    baselines: list[Baseline]
    """Well-known layouts, to compare with the plan."""
    settings: list[SettingChange]
    """Other settings of the plan, each priced by itself."""
    cost: RunCost | None = None
    """What a token budget costs."""
    generators: GeneratorPlan | None = None
    """How many generators the learner of a run with rl.objective needs."""


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Planning makes 200,000 objects that live until its end, and 500 in reference cycles: looking for those takes a
    fifth of its time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@without_garbage_collection()
def make_plan(
    workload: Workload,
    cluster: Cluster,
    position: int = 1,
    top: int = 8,
    scaling: bool = False,
    critical_batch: float | None = None,
    file: str = "PLAN.toml",
    every_plan: bool = False,
    tokens: float | None = None,
    price: float | None = None,
) -> PlanResult:
    """Plans a workload on all devices of a cluster; raises ConfigError with suggestions if no plan is feasible.

    `every_plan` lists similar plans, too; `tokens` is a token budget whose cost is stated, at a `price` per GPU-hour.
    """
    workload = workload.on(cluster)
    cache = CostCache(workload, cluster)
    result = search(cache, top=max(top, position, MIN_RANKED))
    if not result.ranked:
        raise infeasible_error(cache)
    listed = [PlanFamily((plan,)) for plan in result.ranked] if every_plan else result.families
    if not 1 <= position <= len(listed):
        raise ConfigError(f"plan {position} does not exist: {len(listed)} are listed", f"expected 1 to {len(listed)}")
    chosen = with_all_ranks(listed[position - 1].best)
    steps, summary = build_ladder(cache, chosen)
    others = [row.best for number, row in enumerate(listed[: position + 2], 1) if number != position]
    explanation = explain(chosen, others, (steps[0].estimate, steps[0].bottleneck), cache, file)
    config = workload.base_config
    return PlanResult(
        workload,
        cluster,
        result,
        chosen,
        position,
        steps,
        summary,
        explanation,
        scaling_table(cache, chosen, critical_batch) if scaling else None,
        listed,
        build_baselines(cache),
        price_settings(cache, chosen),
        run_cost(chosen, tokens, price) if tokens is not None else None,
        plan_generators(chosen.job, config.rl, chosen.seconds) if config and config.rl.enabled else None,
    )


def with_all_ranks(plan: Estimate) -> Estimate:
    """Returns the plan with the memory of all pipeline ranks; the search estimates those that may need most."""
    corrections = corrections_for(plan.job.cluster)
    return replace(plan, memory_by_rank=corrections.correct_memory(plan.job, estimate_memory(plan.job)))


def plan_json(result: PlanResult, top: int) -> dict[str, Any]:
    """Returns the result as JSON; every plan in it is a prediction record."""
    work, cluster = result.workload, result.cluster
    return {
        "model": model_json(work.model),
        "cluster": json.loads(json.dumps(cluster_json(cluster))) | {"devices": cluster.device_count},
        "trainable": work.base_config is not None,
        "pinned": dict(work.pinned),
        "notes": list(work.notes),
        "trainer": trainer_json(result),
        "headroom": work.headroom,
        "position": result.position,
        "plan": prediction_record(result.chosen),
        "traffic": [dataclasses.asdict(row) for row in exact_traffic(result.chosen)],
        "memory_risk": memory_risk(result.chosen),
        "ranked": [prediction_record(row.best) for row in result.listed[:top]],
        "similar": [row.similar for row in result.listed[:top]],
        "baselines": [
            {
                "name": row.name,
                "reason": row.reason,
                "relative_seconds": row.estimate.seconds / result.chosen.seconds if row.estimate else None,
                "plan": prediction_record(row.estimate) if row.estimate else None,
            }
            for row in result.baselines
        ],
        "settings": [dataclasses.asdict(change) for change in result.settings],
        "cost": cost_json(result.cost) if result.cost else None,
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


def trainer_json(result: PlanResult) -> dict[str, Any]:
    """Returns the trainer, and the plan's MFU by each convention of FLOP."""
    name = result.workload.trainer_name
    return {
        "name": name,
        "profile": result.chosen.job.trainer.name,
        "mfu_convention": flop_convention(result.workload),
        "mfu": trainer_mfu(result.chosen, name),
        "mfu_causal": result.chosen.mfu,
        "mfu_whole_scores": mfu_with_masked_scores(result.chosen),
        "hfu": result.chosen.hfu,
    }


def cost_json(cost: RunCost) -> dict[str, Any]:
    return dataclasses.asdict(cost) | {"money": cost.money, "megawatt_hours": cost.megawatt_hours}


def model_json(model: Architecture | TracedModel) -> dict[str, Any]:
    sizes = model.to_json() if isinstance(model, TracedModel) else json.loads(json.dumps(dataclasses.asdict(model)))
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
        "serial_seconds": table.serial_seconds,
        "strong_exposure": dataclasses.asdict(table.strong_exposure) if table.strong_exposure else None,
        "weak_exposure": dataclasses.asdict(table.weak_exposure) if table.weak_exposure else None,
        "same_layout_devices": table.largest.job.layout.ranks,
        "critical_batch_tokens": table.critical_batch,
        "assumption": table.assumption,
    }


def trainable_config(work: Workload) -> RunConfig:
    """Returns the config of a workload; raises ConfigError if its plans cannot be written as a run file."""
    if work.base_config is not None:
        return work.base_config
    if work.trainer is not None:
        raise ConfigError(
            f"a plan for {work.trainer_name} cannot be written as a run file, which Meshwright's own trainer reads",
            "try --json, or --trainer meshwright",
        )
    reason = work.notes[0] if work.notes else "Meshwright's decoder cannot train this model"
    raise ConfigError(f"{work.model.name} cannot be written as a run file: {reason}", "try --json")


def plan_toml(result: PlanResult) -> str:
    """Returns the chosen plan as a run file that `meshwright train` accepts."""
    config = candidate_config(trainable_config(result.workload), Candidate.from_job(result.chosen.job))
    return config_to_toml(replace(config, planned_for=result.cluster.size_name))
