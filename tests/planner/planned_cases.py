"""Workloads, clusters and cached plans that the tests of the search share."""

from __future__ import annotations

from functools import cache

from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.models.architecture import Architecture, LatentAttention
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.plan_result import PlanResult, make_plan
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


def cost_cache(model: str, cluster: str, *overrides: str) -> CostCache:
    return CostCache(build_workload(model, overrides), resolve_cluster(cluster))


@cache
def cached_plan(model: str, cluster: str, scaling: bool = False) -> PlanResult:
    return make_plan(build_workload(model), resolve_cluster(cluster), scaling=scaling)


def untrainable_workload() -> Workload:
    """A model that Meshwright's decoder cannot train: latent attention, and a vocabulary that nothing divides."""
    model = Architecture(
        "lat", 27, 2048, 16, 16, 128, 10944, 102403, experts=64, experts_active=6, expert_ffn=1408, shared_ffn=2816,
        dense_layers=1, latent_attention=LatentAttention(0, 512, 128, 64, 128),
    )  # fmt: skip
    return Workload(model, 512, 4096)
