"""The ladder begins with DDP, each rung removes or lessens what bound the one before, and it ends where none does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from asked_plans import CASES, answered, desk

from meshwright.planner.search.ladder import GAIN, WORTH, bound_by, ladder, rank_of
from meshwright.planner.search.search import search
from meshwright.planner.wording import lost


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_the_first_rung_is_ddp(model, cluster):
    first = answered(model, cluster).rungs[0]
    layout = first.estimate.job.layout
    assert first.name == "DDP"
    assert (layout.pipeline, layout.shard, layout.context, layout.tensor, layout.expert) == (1, 1, 1, 1, 1)
    assert (first.estimate.job.sharding, first.estimate.job.activation_checkpoint) == ("none", "none")


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_every_rung_removes_or_lessens_what_bound_the_one_before(model, cluster):
    rungs = answered(model, cluster).rungs
    for before, after in pairwise(rungs):
        assert before.binding.kind != "nothing"
        if rank_of(before.binding) == 2:
            assert after.estimate.seconds < (1 - GAIN) * before.estimate.seconds
        else:
            further = rank_of(after.binding) > rank_of(before.binding)
            assert further or after.binding.over < before.binding.over
        assert after.fixed
        assert after.cost.startswith("step ")


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_a_rung_is_bound_by_what_its_figures_say(model, cluster):
    for rung in answered(model, cluster).rungs:
        held, capacity = rung.estimate.peak_memory.total, rung.estimate.job.cluster.device.memory
        if rung.binding.kind == "memory":
            assert rung.binding.over == held - capacity > 0
        elif rung.binding.kind == "nothing":
            assert held <= capacity
            assert max(lost(rung.estimate).values()) <= WORTH * rung.estimate.seconds
        elif rung.binding.kind != "batch":
            assert rung.binding.over == lost(rung.estimate)[rung.binding.kind] > WORTH * rung.estimate.seconds


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_the_end_says_how_it_stands_to_the_plan(model, cluster):
    whole = answered(model, cluster)
    assert whole.ending.startswith(("the last rung is the plan", "the search's plan is "))


def test_devices_without_a_sample_bind_first_and_are_given_work():
    whole = answered("llama-405b", "h100:8x2048")
    first = whole.rungs[0]
    assert first.binding.kind == "batch"
    assert first.estimate.job.layout.ranks == 2048
    assert "14,336 devices" in first.binding.told
    assert whole.rungs[1].estimate.job.layout.ranks == 16384
    assert whole.rungs[-1].binding.kind not in ("batch", "memory")


def test_where_ddp_does_there_is_one_rung():
    whole = answered("gpt2-124m", "a100-80:8")
    if bound_by(whole.rungs[0].estimate).kind == "nothing":
        assert len(whole.rungs) == 1


def test_what_was_not_added_is_told_with_its_figure():
    tried = [told for rung in answered("llama-70b", "h100:8x16").rungs for told in rung.tried]
    assert any(told.startswith("recompute: ") and "over" in told for told in tried)


def test_a_rung_uses_nothing_that_was_not_added():
    added: set[str] = set()
    for rung in answered("llama-70b", "h100:8x16").rungs:
        added |= {rung.name.removeprefix("+ ")}
        used = {axis for axis in rung.estimate.job.layout.axes if axis != "replicate"}
        assert used <= added
        assert rung.estimate.job.activation_checkpoint == "none" or "recompute" in added


def test_the_ladder_costs_a_few_more_estimates_than_the_search():
    at = desk("llama-70b", "h100:8x16")
    search(at)
    before = len(at.timings)
    ladder(at, search(at).ranked[0])
    assert len(at.timings) - before < 1000
