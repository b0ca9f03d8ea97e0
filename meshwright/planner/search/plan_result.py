"""Everything that `meshwright plan` answers: the plans, the ladder, the reasons and the scale; torch-free."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from meshwright.config import config_to_toml
from meshwright.errors import ConfigError
from meshwright.planner.calibration.prediction import prediction_record
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.search.candidate import Candidate, candidate_config
from meshwright.planner.search.explain import Explanation, explain
from meshwright.planner.search.ladder import LadderStep, build_ladder
from meshwright.planner.search.scaling import ScalingRow, ScalingTable, scaling_table
from meshwright.planner.search.search import MIN_RANKED, CostCache, SearchResult, search
from meshwright.planner.search.suggestions import infeasible_error
from meshwright.planner.workload.workload import Workload


@dataclass(frozen=True)
class PlanResult:
    work: Workload
    cluster: Cluster
    found: SearchResult
    chosen: Estimate
    """the plan that is shown, explained and written"""
    place: int
    """its place in the list, from 1"""
    ladder: list[LadderStep]
    ladder_summary: str
    """how the last rung stands to the plan"""
    explanation: Explanation
    scale: ScalingTable | None


def make_plan(
    work: Workload,
    cluster: Cluster,
    place: int = 1,
    top: int = 8,
    scale: bool = False,
    critical: float | None = None,
    file: str = "PLAN.toml",
) -> PlanResult:
    """Of a workload on all devices of a cluster; refused in one line where nothing fits."""
    desk = CostCache(work, cluster)
    found = search(desk, top=max(top, place, MIN_RANKED))
    if not found.ranked:
        raise infeasible_error(desk)
    if not 1 <= place <= len(found.ranked):
        raise ConfigError(f"there is no plan {place} of {len(found.ranked)}", f"allowed: 1 to {len(found.ranked)}")
    chosen = found.ranked[place - 1]
    rungs, ending = build_ladder(desk, found.ranked[0])
    others = [other for other in found.ranked[: place + 2] if other is not chosen]
    reasons = explain(chosen, others, (rungs[0].estimate, rungs[0].bottleneck), desk, file)
    table = scaling_table(desk, chosen, critical) if scale else None
    return PlanResult(work, cluster, found, chosen, place, rungs, ending, reasons, table)


def as_json(whole: PlanResult, top: int) -> dict[str, Any]:
    """For machines; every plan is a prediction record."""
    return {
        "model": dataclasses.asdict(whole.work.model) | {"parameters": whole.work.model.parameters},
        "cluster": json.loads(json.dumps(dataclasses.asdict(whole.cluster))) | {"devices": whole.cluster.device_count},
        "trainable": whole.work.base_config is not None,
        "pinned": dict(whole.work.pinned),
        "notes": list(whole.work.notes),
        "place": whole.place,
        "plan": prediction_record(whole.chosen),
        "ranked": [prediction_record(each) for each in whole.found.ranked[:top]],
        "front": [prediction_record(each) for each in whole.found.front],
        "search": {
            "estimates": whole.found.estimates,
            "weighed": whole.found.weighed,
            "frames": whole.found.degrees,
            "left_out": whole.found.left_out,
            "layouts": len(whole.found.ranked),
        },
        "ladder": [
            {
                "rung": rung.name,
                "binding": dataclasses.asdict(rung.bottleneck),
                "fixed": rung.resolved,
                "cost": rung.cost,
                "tried": list(rung.rejected),
                "plan": prediction_record(rung.estimate),
            }
            for rung in whole.ladder
        ],
        "ending": whole.ladder_summary,
        "explanation": dataclasses.asdict(whole.explanation),
        "scale": scaling_json(whole.scale) if whole.scale else None,
    }


def scaling_json(scale: ScalingTable) -> dict[str, Any]:
    def row(one: ScalingRow) -> dict[str, Any]:
        return {
            "factor": one.factor,
            "devices": one.devices,
            "batch": one.batch,
            "kept": one.kept,
            "efficiency": one.efficiency,
            "exposed_share": one.exposed_share,
            "useful_tokens_per_second": one.useful_tokens_per_second,
            "plan": prediction_record(one.estimate) if one.estimate else None,
        }

    return {
        "strong": [row(one) for one in scale.strong],
        "growing": [row(one) for one in scale.weak],
        "serial_share": scale.serial_fraction,
        "critical_batch_tokens": scale.critical,
        "assumption": scale.assumption,
    }


def plan_toml(whole: PlanResult) -> str:
    """The plan as a run file, in the words of `meshwright train`."""
    if whole.work.base_config is None:
        reason = whole.work.notes[0] if whole.work.notes else "our decoder does not train it"
        raise ConfigError(f"{whole.work.model.name} cannot be written as a run: {reason}", "allowed: --json")
    return config_to_toml(candidate_config(whole.work.base_config, Candidate.of(whole.chosen.job)))
