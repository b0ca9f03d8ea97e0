"""Tests of the ladder: it starts with DDP, each step adds a technique of the plan, and the last step is the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import is_compiled, lost_seconds
from meshwright.planner.search.explanation.ladder import (
    BOTTLENECK_SHARE,
    Bottleneck,
    build_ladder,
    compare_with_first,
    describe_resolved,
    find_bottleneck,
)
from meshwright.planner.search.plan_result import make_plan
from meshwright.planner.search.search import search
from meshwright.planner.workload.workload_args import build_workload
from tests.planner.planned_cases import CASES, cached_plan, cost_cache


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_first_step_of_the_ladder_is_eager_ddp(model, cluster):
    first = cached_plan(model, cluster).ladder[0]
    layout = first.estimate.job.layout
    assert (first.name, first.technique) == ("DDP", "")
    assert (layout.pipeline, layout.shard, layout.context, layout.tensor, layout.expert) == (1, 1, 1, 1, 1)
    assert (first.estimate.job.sharding, first.estimate.job.activation_checkpoint) == ("none", "none")
    assert not is_compiled(first.estimate.job)


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_last_step_of_the_ladder_is_the_plan(model, cluster):
    result = cached_plan(model, cluster)
    assert result.ladder[-1].estimate is result.chosen
    assert result.ladder_summary.startswith("The last step is the plan, ")


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_every_step_adds_one_technique_and_says_what_it_changes(model, cluster):
    added: set[str] = set()
    for step in cached_plan(model, cluster).ladder[1:]:
        assert step.technique not in added
        added.add(step.technique)
        axes = {axis for axis in step.estimate.job.layout.active_axes if axis != "replicate"}
        assert axes <= added
        assert step.estimate.job.activation_checkpoint == "none" or "activation_checkpoint" in added
        assert is_compiled(step.estimate.job) == ("compile" in added)
        assert step.resolved
        assert step.cost.startswith("step time ")


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_effect_states_the_micro_batch_where_a_step_changes_it(model, cluster):
    for before, after in pairwise(cached_plan(model, cluster).ladder):
        old, new = before.estimate.job.batch.micro, after.estimate.job.batch.micro
        expected = f", with micro-batch {new} instead of {old}" if old != new else ""
        assert after.resolved.partition(", with micro-batch ")[2] == expected.removeprefix(", with micro-batch ")


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_time_is_improved_only_once_the_batch_and_memory_are_no_bottleneck(model, cluster):
    order = {"batch": 0, "memory": 1}
    for before, after in pairwise(cached_plan(model, cluster).ladder):
        assert order.get(after.bottleneck.kind, 2) >= order.get(before.bottleneck.kind, 2)


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_bottleneck_follows_from_the_figures_of_the_estimate(model, cluster):
    for step in cached_plan(model, cluster).ladder:
        memory, capacity = step.estimate.peak_memory.total, 0.92 * step.estimate.job.cluster.device.memory
        if step.bottleneck.kind == "memory":
            assert step.bottleneck.excess == pytest.approx(memory - capacity)
            assert memory > capacity
        elif step.bottleneck.kind == "none":
            assert memory <= capacity
            assert max(lost_seconds(step.estimate).values()) <= BOTTLENECK_SHARE * step.estimate.seconds
        elif step.bottleneck.kind != "batch":
            lost = lost_seconds(step.estimate)[step.bottleneck.kind]
            assert step.bottleneck.excess == lost > BOTTLENECK_SHARE * step.estimate.seconds


def test_devices_without_a_sample_are_the_first_bottleneck():
    ladder = cached_plan("llama-405b", "h100:8x2048").ladder
    first = ladder[0]
    assert first.bottleneck.kind == "batch"
    assert first.estimate.job.layout.ranks == 2048
    assert "14,336 devices" in first.bottleneck.message
    assert ladder[1].estimate.job.layout.ranks == 16384
    assert ladder[-1].bottleneck.kind not in ("batch", "memory")


def test_bottleneck_of_a_full_device_counts_the_headroom():
    plan = cached_plan("llama-8b", "h100:8").chosen
    used = plan.peak_memory.total / plan.job.cluster.device.memory
    assert find_bottleneck(plan, headroom=0.99 - used).kind != "memory"
    assert find_bottleneck(plan, headroom=1.01 - used).kind == "memory"


def test_rejected_alternatives_are_reported_with_their_bottleneck():
    rejected = [message for step in cached_plan("llama-70b", "h100:8x16").ladder for message in step.rejected]
    assert any(": memory: " in message and "over" in message for message in rejected)


def test_ladder_needs_few_estimates_beyond_those_of_the_search():
    cache = cost_cache("llama-70b", "h100:8x16")
    chosen = search(cache).ranked[0]
    before = cache.timed
    build_ladder(cache, chosen)
    assert cache.timed - before < 100


def test_gain_over_eager_ddp_says_that_it_is_without_compile():
    result = make_plan(build_workload("tiny"), resolve_cluster("h100:2"))
    assert is_compiled(result.chosen.job)
    assert result.ladder_summary.endswith("% faster than DDP without torch.compile.")
    eager = result.ladder[0]
    faster = replace(eager, estimate=replace(eager.estimate, phases={"forward": 0.5 * eager.estimate.seconds}))
    assert compare_with_first([eager, faster]).endswith(": 50% faster than DDP.")


def test_slower_step_has_a_reason():
    """A step that neither the batch nor memory asks for says why it is in the ladder: here, the risk of not fitting."""
    fast = cached_plan("llama-8b", "h100:8").chosen
    full = with_memory(fast, 0.995)
    slower = replace(with_memory(fast, 0.5), phases={"forward": 1.01 * fast.seconds})
    none = Bottleneck("none", 0, "none")
    effect = describe_resolved(none, none, full, slower, slower)
    assert effect.startswith("step time raised by 1.0%, risk that it does not fit 4")
    assert effect.endswith("% -> 0.0%")
    later = replace(with_memory(fast, 0.5), phases={"forward": 0.9 * fast.seconds})
    effect = describe_resolved(none, none, with_memory(fast, 0.5), slower, later)
    assert effect == "step time raised by 1.0%, which later steps make up for"


def with_memory(plan: Estimate, share: float) -> Estimate:
    """The plan with so much of the device's memory in use, on one pipeline rank."""
    memory = plan.peak_memory
    activations = memory.activations + share * plan.job.cluster.device.memory - memory.total
    return replace(plan, memory_by_rank=[replace(memory, activations=activations)])
