"""The search finds what trying everything finds, of what fits and runs, in time and without torch."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from math import prod

import pytest
from planned_cases import CASES, answered, desk, foreign

from meshwright.planner.hardware.resolve_cluster import resolve_cluster
from meshwright.planner.search import search as searching
from meshwright.planner.search.candidate import Candidate, candidate_config, validation_error
from meshwright.planner.search.search import MAX_MEMORY_ESTIMATES, CostCache, min_memory_candidate, search
from meshwright.planner.search.search_space import (
    CHECKPOINT_MODES,
    SHARDINGS,
    SearchSpace,
    divisors,
    fills_schedule,
    model_parallel_degrees,
    pipeline_schedules,
    sharded_layouts,
)
from meshwright.topology.unsupported import validate


def everything(at: CostCache):
    """Every choice that fits, is allowed and fills its schedule; nothing else is left out."""
    for frame in model_parallel_degrees(at.work, at.cluster.device_count, at.cluster.devices_per_node, SearchSpace()):
        for sharding, options in sharded_layouts(at.work, frame, SearchSpace()):
            sizes = divisors(at.work.global_batch // frame.data)
            for layout, micro, recompute in product(options, sizes, CHECKPOINT_MODES):
                for kind, each in pipeline_schedules(at.work, frame):
                    choice = Candidate(layout, micro, sharding, recompute, kind, each, frame.method)
                    if not fills_schedule(kind, frame.pipeline, at.work.global_batch // frame.data // micro):
                        continue
                    if validation_error(at.work, choice) is None and at.fits(choice):
                        yield choice


@pytest.mark.parametrize(
    ("model", "cluster", "words"),
    [
        ("llama-8b", "h100:8", ["--batch.global=32"]),
        ("llama-1b", "a100-40:4", ["--batch.global=24"]),
        ("deepseek-moe-16b", "h200:8", ["--batch.global=16"]),
    ],
)
def test_the_plan_is_as_quick_as_the_best_of_all(model, cluster, words):
    at = desk(model, cluster, *words)
    best = min(at.time(choice).seconds for choice in everything(at))
    fresh = desk(model, cluster, *words)
    assert search(fresh).ranked[0].seconds <= (1 + searching.TIE_TOLERANCE) * best


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_every_plan_fits_runs_and_uses_every_device(model, cluster):
    whole = answered(model, cluster)
    assert whole.found.ranked
    for found in [*whole.found.ranked, *whole.found.front]:
        assert found.fits
        assert found.job.layout.ranks == whole.cluster.device_count
        layout, batch = validate(candidate_config(whole.work.base_config, Candidate.of(found.job)))
        assert (layout, batch) == (found.job.layout, found.job.batch)


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_no_ddp_that_fits_is_quicker_than_the_plan(model, cluster):
    whole = answered(model, cluster)
    copies = search(desk(model, cluster), SearchSpace(frozenset())).ranked
    assert all(whole.chosen.seconds <= (1 + searching.TIE_TOLERANCE) * found.seconds for found in copies)


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_the_front_is_of_plans_that_no_other_beats(model, cluster):
    found = answered(model, cluster).found
    for one, other in product(found.front, [*found.front, *found.ranked]):
        quicker, lighter = other.seconds < one.seconds, other.peak_memory.total < one.peak_memory.total
        assert not (quicker and lighter)


def test_the_plan_is_the_simplest_of_those_as_quick():
    found = answered("gpt2-124m", "a100-80:8").found.ranked
    alike = [one for one in found if one.seconds <= (1 + searching.TIE_TOLERANCE) * min(each.seconds for each in found)]
    assert searching.complexity(found[0]) == min(map(searching.complexity, alike))


def test_sixteen_thousand_devices_are_searched_in_seconds_and_without_torch():
    code = (
        "import sys, time; began = time.process_time()\n"
        "from meshwright.planner.workload.workload_args import workload\n"
        "from meshwright.planner.hardware.resolve_cluster import cluster_of\n"
        "from meshwright.planner.search.search import CostCache, search\n"
        "found = search(CostCache(workload('llama-405b'), cluster_of('h100:8x2048')))\n"
        "assert 'torch' not in sys.modules\n"
        "print(time.process_time() - began, found.estimates, found.weighed, found.degrees, len(found.ranked))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    took, estimates, weighed, cuts, plans = map(float, done.stdout.split())
    assert took < 6  # a third of it on an idle machine
    assert weighed <= MAX_MEMORY_ESTIMATES + 3 * cuts  # a frame that was begun is finished
    assert estimates <= 10 * cuts
    assert plans >= 8


def test_tensor_groups_stay_inside_a_node_unless_nothing_else_fits():
    for model, cluster in CASES:
        whole = answered(model, cluster)
        assert all(found.job.layout.tensor <= whole.cluster.devices_per_node for found in whole.found.ranked)
    words = [f"--layout.{axis}=1" for axis in ("pipeline", "context")] + ["--layout.shard=none"]
    found = search(desk("llama-8b", "h100:2x4", *words, "--batch.global=8", "--model.layers=80"))
    assert {one.job.layout.tensor for one in found.ranked} <= {4, 8}
    assert found.ranked


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("--layout.tensor=4", lambda job: job.layout.tensor == 4),
        ("--layout.shard=optimizer", lambda job: job.sharding == "optimizer"),
        ("--layout.pipeline=2", lambda job: job.layout.pipeline == 2),
        ("--layout.context=2", lambda job: job.layout.context == 2),
        ("--activation_checkpoint.mode=full", lambda job: job.recompute == "full"),
        ("--batch.micro=2", lambda job: job.batch.micro == 2),
    ],
)
def test_what_a_word_pins_every_plan_keeps(word, read):
    found = search(desk("llama-8b", "h100:8x4", word))
    assert found.ranked
    assert all(read(one.job) for one in [*found.ranked, *found.front])


def test_a_schedule_is_pinned_with_its_stages():
    at = desk(
        "llama-8b",
        "h100:8x4",
        "--layout.pipeline=4",
        "--pipeline.schedule=interleaved",
        "--pipeline.stages=4",
        "--batch.global=64",
    )
    assert {(one.job.schedule, one.job.stages_per_rank) for one in search(at).ranked} == {("interleaved", 4)}


def test_a_model_that_our_decoder_does_not_train_is_planned_by_the_usual_rules():
    work = foreign()
    found = search(CostCache(work, resolve_cluster("h100:8x4"))).ranked
    assert found
    for one in found:
        layout, model = one.job.layout, work.model
        assert one.job.run_config is None
        assert model.heads % layout.tensor == model.expert_ffn % layout.tensor == 0
        assert layout.pipeline * one.job.stages_per_rank <= model.layers
        assert model.experts % layout.expert == 0
        assert layout.expert_axes_size % layout.expert == 0
        assert one.job.batch.global_ == one.job.batch.micro * layout.data_degree * one.job.batch.accumulation


def test_the_lightest_is_lighter_than_every_plan():
    at = desk("llama-8b", "h100:8")
    least = min_memory_candidate(at)
    assert least is not None
    assert all(at.peak_memory(least).total <= found.peak_memory.total for found in search(at).ranked)


def test_the_space_is_what_a_search_keeps_to():
    for axes in ((), ("shard",), ("tensor",), ("shard", "context")):
        for one in search(desk("llama-1b", "h100:8"), SearchSpace(frozenset(axes), CHECKPOINT_MODES[:1])).ranked:
            layout = one.job.layout
            used = {axis for axis in ("tensor", "pipeline", "context", "expert") if getattr(layout, axis) > 1}
            assert used | ({"shard"} if one.job.sharding in SHARDINGS else set()) <= set(axes)
            assert one.job.activation_checkpoint == "none"


def test_divisors_are_all_of_them():
    for number in (1, 2, 12, 97, 360, 16384):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    assert prod(divisors(12)) == 1728
