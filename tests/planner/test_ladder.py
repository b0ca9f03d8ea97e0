"""The ladder begins with DDP, each rung removes or lessens what bound the one before, and it ends where none does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from planned_cases import CASES, answered, desk

from meshwright.planner.describe import lost_seconds
from meshwright.planner.search.ladder import BOTTLENECK_SHARE, MIN_GAIN, bottleneck_order, build_ladder, find_bottleneck
from meshwright.planner.search.search import search


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_the_first_rung_is_ddp(model, cluster):
    first = answered(model, cluster).ladder[0]
    layout = first.estimate.job.layout
    assert first.name == "DDP"
    assert (layout.pipeline, layout.shard, layout.context, layout.tensor, layout.expert) == (1, 1, 1, 1, 1)
    assert (first.estimate.job.sharding, first.estimate.job.activation_checkpoint) == ("none", "none")


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_every_rung_removes_or_lessens_what_bound_the_one_before(model, cluster):
    rungs = answered(model, cluster).ladder
    for before, after in pairwise(rungs):
        assert before.bottleneck.kind != "nothing"
        if bottleneck_order(before.bottleneck) == 2:
            assert after.estimate.seconds < (1 - MIN_GAIN) * before.estimate.seconds
        else:
            further = bottleneck_order(after.bottleneck) > bottleneck_order(before.bottleneck)
            assert further or after.bottleneck.excess < before.bottleneck.excess
        assert after.resolved
        assert after.cost.startswith("step ")


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_a_rung_is_bound_by_what_its_figures_say(model, cluster):
    for rung in answered(model, cluster).ladder:
        held, capacity = rung.estimate.peak_memory.total, rung.estimate.job.cluster.device.memory
        if rung.bottleneck.kind == "memory":
            assert rung.bottleneck.excess == held - capacity > 0
        elif rung.bottleneck.kind == "nothing":
            assert held <= capacity
            assert max(lost_seconds(rung.estimate).values()) <= BOTTLENECK_SHARE * rung.estimate.seconds
        elif rung.bottleneck.kind != "batch":
            assert (
                rung.bottleneck.excess
                == lost_seconds(rung.estimate)[rung.bottleneck.kind]
                > BOTTLENECK_SHARE * rung.estimate.seconds
            )


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_the_end_says_how_it_stands_to_the_plan(model, cluster):
    whole = answered(model, cluster)
    assert whole.ladder_summary.startswith(("the last rung is the plan", "the search's plan is "))


def test_devices_without_a_sample_bind_first_and_are_given_work():
    whole = answered("llama-405b", "h100:8x2048")
    first = whole.ladder[0]
    assert first.bottleneck.kind == "batch"
    assert first.estimate.job.layout.ranks == 2048
    assert "14,336 devices" in first.bottleneck.message
    assert whole.ladder[1].estimate.job.layout.ranks == 16384
    assert whole.ladder[-1].bottleneck.kind not in ("batch", "memory")


def test_where_ddp_does_there_is_one_rung():
    whole = answered("gpt2-124m", "a100-80:8")
    if find_bottleneck(whole.ladder[0].estimate).kind == "nothing":
        assert len(whole.ladder) == 1


def test_what_was_not_added_is_told_with_its_figure():
    tried = [told for rung in answered("llama-70b", "h100:8x16").ladder for told in rung.rejected]
    assert any(told.startswith("recompute: ") and "over" in told for told in tried)


def test_a_rung_uses_nothing_that_was_not_added():
    added: set[str] = set()
    for rung in answered("llama-70b", "h100:8x16").ladder:
        added |= {rung.name.removeprefix("+ ")}
        used = {axis for axis in rung.estimate.job.layout.axes if axis != "replicate"}
        assert used <= added
        assert rung.estimate.job.activation_checkpoint == "none" or "recompute" in added


def test_the_ladder_costs_a_few_more_estimates_than_the_search():
    at = desk("llama-70b", "h100:8x16")
    search(at)
    before = len(at.estimates_by_candidate)
    build_ladder(at, search(at).ranked[0])
    assert len(at.estimates_by_candidate) - before < 1000
