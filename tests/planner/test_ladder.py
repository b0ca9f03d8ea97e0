"""Tests of the ladder: it starts with DDP, each step resolves or reduces the bottleneck, and it ends without one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from planned_cases import CASES, cached_plan, cost_cache

from meshwright.planner.describe import lost_seconds
from meshwright.planner.search.ladder import BOTTLENECK_SHARE, MIN_GAIN, bottleneck_order, build_ladder, find_bottleneck
from meshwright.planner.search.search import search


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_first_step_of_the_ladder_is_ddp(model, cluster):
    first = cached_plan(model, cluster).ladder[0]
    layout = first.estimate.job.layout
    assert (first.name, first.technique) == ("DDP", "")
    assert (layout.pipeline, layout.shard, layout.context, layout.tensor, layout.expert) == (1, 1, 1, 1, 1)
    assert (first.estimate.job.sharding, first.estimate.job.activation_checkpoint) == ("none", "none")


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_every_step_resolves_or_reduces_the_bottleneck_before_it(model, cluster):
    for before, after in pairwise(cached_plan(model, cluster).ladder):
        assert before.bottleneck.kind != "none"
        if bottleneck_order(before.bottleneck) == 2:
            assert after.estimate.seconds < (1 - MIN_GAIN) * before.estimate.seconds
        else:
            resolved = bottleneck_order(after.bottleneck) > bottleneck_order(before.bottleneck)
            assert resolved or after.bottleneck.excess < before.bottleneck.excess
        assert after.resolved
        assert after.cost.startswith("step time ")


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_bottleneck_follows_from_the_figures_of_the_estimate(model, cluster):
    for step in cached_plan(model, cluster).ladder:
        memory, capacity = step.estimate.peak_memory.total, step.estimate.job.cluster.device.memory
        if step.bottleneck.kind == "memory":
            assert step.bottleneck.excess == memory - capacity > 0
        elif step.bottleneck.kind == "none":
            assert memory <= capacity
            assert max(lost_seconds(step.estimate).values()) <= BOTTLENECK_SHARE * step.estimate.seconds
        elif step.bottleneck.kind != "batch":
            lost = lost_seconds(step.estimate)[step.bottleneck.kind]
            assert step.bottleneck.excess == lost > BOTTLENECK_SHARE * step.estimate.seconds


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_ladder_summary_compares_the_last_step_with_the_plan(model, cluster):
    summary = cached_plan(model, cluster).ladder_summary
    assert summary.startswith(("The last step is the plan.", "The search chose "))


def test_devices_without_a_sample_are_the_first_bottleneck():
    ladder = cached_plan("llama-405b", "h100:8x2048").ladder
    first = ladder[0]
    assert first.bottleneck.kind == "batch"
    assert first.estimate.job.layout.ranks == 2048
    assert "14,336 devices" in first.bottleneck.message
    assert ladder[1].estimate.job.layout.ranks == 16384
    assert ladder[-1].bottleneck.kind not in ("batch", "memory")


def test_ladder_has_one_step_if_ddp_has_no_bottleneck():
    ladder = cached_plan("gpt2-124m", "a100-80:8").ladder
    if find_bottleneck(ladder[0].estimate).kind == "none":
        assert len(ladder) == 1


def test_rejected_alternatives_are_reported_with_their_bottleneck():
    rejected = [message for step in cached_plan("llama-70b", "h100:8x16").ladder for message in step.rejected]
    assert any(message.startswith("activation checkpointing: memory: ") and "over" in message for message in rejected)


def test_step_uses_only_the_techniques_added_so_far():
    added: set[str] = set()
    for step in cached_plan("llama-70b", "h100:8x16").ladder:
        added.add(step.technique)
        axes = {axis for axis in step.estimate.job.layout.active_axes if axis != "replicate"}
        assert axes <= added
        assert step.estimate.job.activation_checkpoint == "none" or "activation_checkpoint" in added


def test_ladder_needs_few_estimates_beyond_those_of_the_search():
    cache = cost_cache("llama-70b", "h100:8x16")
    chosen = search(cache).ranked[0]
    before = cache.timed
    build_ladder(cache, chosen)
    assert cache.timed - before < 1000
