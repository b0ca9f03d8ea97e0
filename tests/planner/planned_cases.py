"""Workloads and clusters that the planner's tests share."""

from __future__ import annotations

from functools import cache

from meshwright.planner.hardware.resolve_cluster import resolve_cluster
from meshwright.planner.search.plan_result import PlanResult, make_plan
from meshwright.planner.search.search import CostCache
from meshwright.planner.workload.architecture import Architecture, LatentAttention
from meshwright.planner.workload.workload import Workload
from meshwright.planner.workload.workload_args import build_workload

CASES = [
    ("gpt2-124m", "a100-80:8"),
    ("llama-8b", "h100:8"),
    ("llama-8b", "h100:8x3"),
    ("llama-70b", "h100:8x16"),
    ("mixtral-8x7b", "h200:8x4"),
    ("deepseek-moe-16b", "h100:8x2"),
]


def desk(model: str, cluster: str, *overrides: str) -> CostCache:
    return CostCache(build_workload(model, overrides), resolve_cluster(cluster))


@cache
def answered(model: str, cluster: str, scale: bool = False) -> PlanResult:
    return make_plan(build_workload(model), resolve_cluster(cluster), scale=scale)


def foreign() -> Workload:
    """A model that our decoder does not train: latent attention, a vocabulary that nothing divides."""
    model = Architecture(
        "lat", 27, 2048, 16, 16, 128, 10944, 102403, experts=64, experts_active=6, experts_shared=2, expert_ffn=1408,
        dense_layers=1, latent_attention=LatentAttention(0, 512, 128, 64, 128),
    )  # fmt: skip
    return Workload(model, 512, 4096)
