"""Tests of the search: it matches an exhaustive search, proposes only feasible plans, is fast and needs no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import groupby, pairwise, product
from math import prod
from random import Random

import pytest

from meshwright.base.config import load_config
from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.base.models.registry import model_architecture
from meshwright.base.topology.unsupported import validate
from meshwright.planner.search.bounds import candidate_bounds
from meshwright.planner.search.candidate import Candidate, candidate_config, validation_error
from meshwright.planner.search.choice import CHOICE_TOLERANCE, complexity, expected_seconds
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.degree_limits import min_memory_candidate
from meshwright.planner.search.explanation.baselines import build_baselines
from meshwright.planner.search.search import MAX_MEMORY_ESTIMATES, search
from meshwright.planner.search.search_space import (
    CHECKPOINT_MODES,
    SearchSpace,
    context_methods,
    divisors,
    fills_schedule,
    model_parallel_degrees,
    pipeline_schedules,
    sharded_layouts,
)
from meshwright.planner.workload.workload import Workload
from meshwright.planner.workload.workload_args import build_workload, for_trainer
from tests.planner.planned_cases import CASES, cached_plan, cost_cache, untrainable_workload


def all_candidates(cache: CostCache):
    """Yields every candidate that fills its schedule; skips nothing else."""
    work, cluster, space = cache.work, cache.cluster, SearchSpace().of_trainer(cache.work)
    for degrees in model_parallel_degrees(work, cluster.device_count, cluster.devices_per_node, space):
        for sharding, layouts in sharded_layouts(work, degrees, space):
            sizes = divisors(work.global_batch // degrees.data)
            for layout, micro, mode in product(layouts, sizes, space.checkpoint_modes):
                for schedule, stages in pipeline_schedules(work, degrees.pipeline):
                    if fills_schedule(schedule, degrees.pipeline, work.global_batch // degrees.data // micro):
                        yield Candidate(layout, micro, sharding, mode, schedule, stages, degrees.context_method)


def all_feasible_candidates(cache: CostCache):
    for candidate in all_candidates(cache):
        if validation_error(cache.work, candidate) is None and cache.fits(candidate):
            yield candidate


def trainer_cache(model: str, cluster: str, trainer: str, *overrides: str) -> CostCache:
    return CostCache(for_trainer(build_workload(model, overrides), trainer), resolve_cluster(cluster))


@pytest.mark.parametrize(
    ("model", "cluster", "overrides"),
    [
        pytest.param("llama-8b", "h100:8", ["--batch.global=32"], marks=pytest.mark.long),
        ("llama-1b", "a100-40:4", ["--batch.global=24"]),
        pytest.param("deepseek-moe-16b", "h200:8", ["--batch.global=16"], marks=pytest.mark.long),
    ],
)
def test_search_is_as_fast_as_the_exhaustive_search(model, cluster, overrides):
    cache = cost_cache(model, cluster, *overrides)
    best = min(expected_seconds(cache.estimate(candidate)) for candidate in all_feasible_candidates(cache))
    fresh = cost_cache(model, cluster, *overrides)
    assert expected_seconds(search(fresh).ranked[0]) <= (1 + CHOICE_TOLERANCE) * best


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_every_plan_fits_validates_and_uses_every_device(model, cluster):
    result = cached_plan(model, cluster)
    assert result.search.ranked
    for plan in [*result.search.ranked, *result.search.pareto_front]:
        assert plan.fits
        assert plan.job.layout.ranks == result.cluster.device_count
        layout, batch = validate(candidate_config(result.workload.base_config, Candidate.from_job(plan.job)))
        assert (layout, batch) == (plan.job.layout, plan.job.batch)


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_no_ddp_plan_that_fits_is_faster_than_the_chosen_plan(model, cluster):
    result = cached_plan(model, cluster)
    ddp = search(cost_cache(model, cluster), SearchSpace(frozenset())).ranked
    assert all(result.chosen.seconds <= (1 + CHOICE_TOLERANCE) * plan.seconds for plan in ddp)


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_no_plan_beats_the_pareto_front_in_both_time_and_memory(model, cluster):
    result = cached_plan(model, cluster).search
    for plan, other in product(result.pareto_front, [*result.pareto_front, *result.ranked]):
        faster, smaller = other.seconds < plan.seconds, other.peak_memory.total < plan.peak_memory.total
        assert not (faster and smaller)


def test_pareto_front_does_not_depend_on_the_order_of_sets():
    code = (
        "from meshwright.planner.workload.workload_args import build_workload\n"
        "from meshwright.base.hardware.resolve_cluster import resolve_cluster\n"
        "from meshwright.planner.search.candidate import Candidate\n"
        "from meshwright.planner.search.cost_cache import CostCache\n"
        "from meshwright.planner.search.search import search\n"
        "result = search(CostCache(build_workload('llama-70b'), resolve_cluster('h100:8x16')))\n"
        "print([Candidate.from_job(plan.job) for plan in result.pareto_front])"
    )

    def front(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment).stdout

    assert front("1") == front("2") == front("3")


def test_chosen_plan_is_the_simplest_of_tied_plans():
    ranked = cached_plan("gpt2-124m", "a100-80:8").search.ranked
    fastest = min(map(expected_seconds, ranked))
    tied = [plan for plan in ranked if expected_seconds(plan) <= (1 + CHOICE_TOLERANCE) * fastest]
    assert complexity(ranked[0]) == min(map(complexity, tied))


def test_search_of_16384_devices_is_bounded_and_imports_no_torch():
    code = (
        "import sys\n"
        "from meshwright.planner.workload.workload_args import build_workload\n"
        "from meshwright.base.hardware.resolve_cluster import resolve_cluster\n"
        "from meshwright.planner.search.cost_cache import CostCache\n"
        "from meshwright.planner.search.search import search\n"
        "result = search(CostCache(build_workload('llama-405b'), resolve_cluster('h100:8x2048')))\n"
        "assert 'torch' not in sys.modules\n"
        "print(result.timed, result.memory_estimates, result.degrees, len(result.ranked))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    timed, memory_estimates, degrees, plans = map(float, done.stdout.split())
    assert memory_estimates <= min(100, MAX_MEMORY_ESTIMATES)
    assert timed <= 30 < degrees
    assert plans >= 8


def test_search_of_16384_devices_shares_its_lower_bounds(monkeypatch):
    """Most schedules are skipped by their memory, so that fewer step times are bounded than memories, and most bounds
    share their trainer, activations and modules with others.
    """
    calls: Counter[str] = Counter()

    def count(owner, name):
        counted = getattr(owner, name)

        def call(*args):
            calls[name] += 1
            return counted(*args)

        monkeypatch.setattr(owner, name, call)

    count(candidate_bounds, "least_seconds")
    count(candidate_bounds, "least_bytes")
    count(CostCache, "candidate_job")
    search(cost_cache("llama-405b", "h100:8x2048"))
    assert 0 < calls["least_seconds"] <= 9_000
    assert 0 < calls["least_bytes"] <= 17_000
    assert 0 < calls["candidate_job"] <= 7_000


def test_tensor_parallel_groups_stay_inside_a_node_unless_nothing_else_fits():
    for model, cluster in CASES:
        result = cached_plan(model, cluster)
        assert all(plan.job.layout.tensor <= result.cluster.devices_per_node for plan in result.search.ranked)
    overrides = [f"--layout.{axis}=1" for axis in ("pipeline", "context")] + ["--layout.shard=none"]
    result = search(cost_cache("llama-8b", "h100:2x4", *overrides, "--batch.global=8", "--model.layers=80"))
    assert {plan.job.layout.tensor for plan in result.ranked} <= {4, 8}
    assert result.ranked


@pytest.mark.parametrize(
    ("override", "is_kept"),
    [
        ("--layout.tensor=4", lambda job: job.layout.tensor == 4),
        ("--layout.shard=optimizer", lambda job: job.sharding == "optimizer"),
        ("--layout.pipeline=2", lambda job: job.layout.pipeline == 2),
        ("--layout.context=2", lambda job: job.layout.context == 2),
        ("--activation_checkpoint.mode=full", lambda job: job.activation_checkpoint == "full"),
        ("--batch.micro=2", lambda job: job.batch.micro == 2),
    ],
)
def test_every_plan_keeps_a_pinned_setting(override, is_kept):
    result = search(cost_cache("llama-8b", "h100:8x4", override))
    assert result.ranked
    assert all(is_kept(plan.job) for plan in [*result.ranked, *result.pareto_front])


def test_pinned_schedule_keeps_its_stages_per_rank():
    cache = cost_cache(
        "llama-8b",
        "h100:8x4",
        "--layout.pipeline=4",
        "--pipeline.schedule=interleaved",
        "--pipeline.stages=4",
        "--batch.global=64",
    )
    assert {(plan.job.schedule, plan.job.stages_per_rank) for plan in search(cache).ranked} == {("interleaved", 4)}


def test_model_that_the_decoder_cannot_train_is_planned_by_the_usual_divisibility_rules():
    work = untrainable_workload()
    ranked = search(CostCache(work, resolve_cluster("h100:8x4"))).ranked
    assert ranked
    for plan in ranked:
        layout, model = plan.job.layout, work.model
        assert plan.job.run_config is None
        assert model.heads % layout.tensor == model.expert_ffn % layout.tensor == 0
        assert layout.pipeline * plan.job.stages_per_rank <= model.layers
        assert model.experts % layout.expert == 0
        assert layout.expert_axes_size % layout.expert == 0
        assert plan.job.batch.global_ == plan.job.batch.micro * layout.data_degree * plan.job.batch.accumulation


def test_min_memory_candidate_needs_less_memory_than_every_plan():
    cache = cost_cache("llama-8b", "h100:8")
    smallest = min_memory_candidate(cache)
    assert smallest is not None
    assert all(cache.peak_memory(smallest).total <= plan.peak_memory.total for plan in search(cache).ranked)


def test_search_stays_inside_its_search_space():
    for axes in ((), ("shard",), ("tensor",), ("shard", "context")):
        for plan in search(cost_cache("llama-1b", "h100:8"), SearchSpace(frozenset(axes), CHECKPOINT_MODES[:1])).ranked:
            layout = plan.job.layout
            used = {axis for axis in ("tensor", "pipeline", "context", "expert") if getattr(layout, axis) > 1}
            assert used | ({"shard"} if plan.job.sharding != "none" else set()) <= set(axes)
            assert plan.job.activation_checkpoint == "none"


def test_divisors_are_complete():
    for number in (1, 2, 12, 97, 360, 16384):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    assert prod(divisors(12)) == 1728


def test_ring_attention_is_offered_only_to_families_with_plain_attention():
    def methods(family: str) -> list[str]:
        config = load_config(overrides=[f"--model.family={family}"])
        work = Workload(model_architecture(config.model, family), 8, 512, base_config=config)
        return list(context_methods(work, context=2, tensor=1))

    assert methods("llama") == ["ring", "all-to-all"]
    assert methods("gemma2") == ["all-to-all"]


FROZEN_BLOCKS = '--optimizer.groups=[{pattern="*.blocks.[0-9].*",frozen=true},{pattern="*embedding*",frozen=true}]'


@pytest.mark.parametrize(
    ("model", "cluster", "trainer"),
    [
        ("llama-8b", "h100:8", "meshwright"),
        ("deepseek-moe-16b", "h200:8", "meshwright"),
        ("llama-70b", "h100:8x8", "meshwright"),
        ("llama-70b", "h100:8x8", "megatron"),
        ("mixtral-8x7b", "h100:8x4", "megatron"),
        ("llama-8b", "h100:8", "torchtitan"),
        ("llama-8b", "l40s:8", "deepspeed"),
        ("llama-8b --lora.rank=16", "h100:8", "meshwright"),
        ("llama-8b " + FROZEN_BLOCKS, "h100:8", "meshwright"),
    ],
)
def test_lower_bounds_are_at_most_the_estimates(model, cluster, trainer):
    model, *options = model.split(" ")
    batch = "--batch.global=64" if cluster.endswith("x8") else "--batch.global=16"
    cache = trainer_cache(model, cluster, trainer, batch, *options)
    candidates = [each for each in all_candidates(cache) if not cache.is_unsupported(each)]
    for candidate in Random(7).sample(candidates, 60):
        estimated = cache.estimate(candidate)
        assert cache.least_seconds(candidate) <= (1 + 1e-9) * estimated.seconds
        assert cache.least_unscheduled_seconds(candidate) <= (1 + 1e-9) * cache.least_seconds(candidate)
        assert cache.least_memory(candidate) <= (1 + 1e-9) * estimated.peak_memory.total


BOUNDED = [("llama-70b", "h100:8x8", "meshwright"), ("deepseek-moe-16b", "h200:8", "meshwright")]
BOUNDED += [("mixtral-8x7b", "h100:8x4", "megatron"), ("llama-8b", "h100:8", "torchtitan")]


@pytest.mark.parametrize(("model", "cluster", "trainer"), BOUNDED)
def test_lower_bounds_that_candidates_share_are_those_of_each_by_itself(model, cluster, trainer):
    def new_cache():
        return trainer_cache(model, cluster, trainer, "--batch.global=64")

    shared = new_cache()
    for candidate in Random(3).sample(list(all_candidates(shared)), 300):
        alone = new_cache()
        assert shared.least_seconds(candidate) == alone.least_seconds(candidate)
        assert shared.least_memory(candidate) == alone.least_memory(candidate)


@pytest.mark.parametrize(("model", "cluster", "trainer"), BOUNDED)
def test_more_sharding_never_raises_the_lower_bound_of_memory(model, cluster, trainer):
    """The search skips a schedule that does not fit with the most sharding, and looks for the smallest shard group."""
    cache = trainer_cache(model, cluster, trainer, "--batch.global=64")
    by_execution: dict[object, list[Candidate]] = {}
    for each in all_candidates(cache):
        degrees = replace(each.layout, replicate=each.layout.data_degree, shard=1)
        by_execution.setdefault(each._replace(layout=degrees, sharding=""), []).append(each)
    for candidates in Random(5).sample(list(by_execution.values()), 300):
        bounds = [cache.least_memory(each) for each in candidates if each.layout.shard in (1, each.layout.data_degree)]
        assert all(more <= (1 + 1e-9) * less for less, more in pairwise(bounds))
        for _, shard_groups in groupby(candidates, lambda each: each.sharding):
            bounds = [cache.least_memory(each) for each in shard_groups]
            assert all(larger <= (1 + 1e-9) * smaller for smaller, larger in pairwise(bounds))


@pytest.mark.parametrize(
    ("model", "cluster", "trainer"),
    [
        ("llama-8b", "h100:8", "meshwright"),
        ("llama-8b", "h100:8", "torchtitan"),
        ("llama-8b", "a100-40:8", "torchtitan"),
        ("llama-8b", "l40s:8", "meshwright"),
        ("llama-8b", "h100:8", "deepspeed"),
        ("llama-70b", "h100:8x8", "torchtitan"),
        ("llama-70b", "h100:8x8", "meshwright"),
    ],
)
def test_no_baseline_that_fits_is_faster_than_the_chosen_plan(model, cluster, trainer):
    cache = trainer_cache(model, cluster, trainer)
    chosen = search(cache).ranked[0]
    for baseline in build_baselines(cache):
        if baseline.estimate is not None and baseline.estimate.peak_memory.total <= cache.memory_limit:
            assert expected_seconds(chosen) <= (1 + CHOICE_TOLERANCE) * expected_seconds(baseline.estimate)
