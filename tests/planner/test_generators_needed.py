"""How long a group takes to generate, and how many generators a learner needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.base.config import load_config
from meshwright.base.hardware.resolve_cluster import resolve_cluster
from meshwright.planner.api import plan
from meshwright.planner.cost.terms.kernel_time import LAUNCH_GAP
from meshwright.planner.generation import (
    KERNELS_PER_BLOCK,
    MAX_WAIT,
    generation_time,
    needed_asynchronous,
    plan_generators,
    wait_share,
)
from meshwright.planner.search.plan_result import plan_json
from meshwright.planner.workload.planned_job import PlannedJob

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl.toml"
LLAMA = [
    "--preset=llama-8b",
    "--precision.compute=bf16",
    "--rl.objective=grpo",
    "--rl.completion_tokens=1024",
    "--data.sequence=2048",
    "--batch.global=256",
]


def planned_job(*overrides):
    config = load_config(overrides=[*LLAMA, *overrides])
    return PlannedJob.from_config(config, resolve_cluster("h100:1")), config.rl


def test_decoding_of_a_small_group_reads_the_weights_once_per_token():
    job, rl = planned_job()
    device = job.cluster.device
    bandwidth = device.memory_bandwidth * device.memory_efficiency
    keys_and_values = 2 * 32 * 8 * 128 * 2  # layers, key-value heads, head size, bytes
    token = (2 * job.model.parameters + 8 * keys_and_values * (1024 + 512)) / bandwidth
    found = generation_time(job, rl)
    assert found.bound == "memory bandwidth"
    assert found.decode == pytest.approx(1024 * (token + 32 * KERNELS_PER_BLOCK * LAUNCH_GAP))


def test_decoding_of_a_large_group_is_bound_by_flop():
    sizes = ["--rl.group_size=2048", "--batch.global=2048", "--data.sequence=32", "--rl.completion_tokens=8"]
    job, rl = planned_job(*sizes)
    assert generation_time(job, rl).bound == "FLOP"


def test_a_reference_policy_scores_every_rollout_a_second_time():
    job, rl = planned_job()
    assert generation_time(job, replace(rl, kl=0.1)).scoring == pytest.approx(2 * generation_time(job, rl).scoring)


def test_synchronous_learner_waits_for_the_slowest_generator():
    assert wait_share(1.0, 8, 4.0, 8, 0) == pytest.approx(1 / 5)
    assert wait_share(1.0, 8, 4.0, 7, 0) == pytest.approx(2 / 6)  # one generator has two groups
    assert wait_share(1.0, 8, 4.0, 100, 0) == pytest.approx(1 / 5)  # a group is not divided


def test_asynchronous_learner_waits_only_for_what_generators_lack():
    assert wait_share(1.0, 8, 4.0, 2, 1) == 0.0
    assert wait_share(1.0, 8, 4.0, 1, 1) == pytest.approx(0.5)
    # the bound permits eight groups beside those of the step, so that more generators find no work
    assert wait_share(10.0, 8, 4.0, 20, 1) == wait_share(10.0, 8, 4.0, 8, 1) > wait_share(10.0, 8, 4.0, 20, 3)


@pytest.mark.parametrize("group_seconds", [0.01, 0.5, 1.0, 7.3, 100.0])
def test_needed_generators_are_the_fewest_that_keep_the_learner_busy(group_seconds):
    needed = needed_asynchronous(group_seconds, 8, 4.0)
    staleness = -(-needed // 8)
    assert wait_share(group_seconds, 8, 4.0, needed, staleness) <= MAX_WAIT + 1e-9
    if needed > 1:
        assert wait_share(group_seconds, 8, 4.0, needed - 1, staleness) > MAX_WAIT


def test_plan_says_that_synchronous_learner_and_generators_alternate():
    job, rl = planned_job()
    found = plan_generators(job, rl, learner_seconds=5.0)
    assert found.synchronous is None
    assert found.groups_per_step == 32
    sentences = found.sentences()
    assert "learner and generators alternate" in sentences[0]
    assert "no number of generators" in sentences[0]
    assert f"{found.asynchronous} generators" in sentences[1]
    slow = plan_generators(job, rl, learner_seconds=1e4)
    assert slow.synchronous == 1
    assert "1 generator for a wait below 5%" in slow.sentences()[0]


def test_weights_that_no_device_has_room_for_are_named():
    job, rl = planned_job()
    small = replace(job, cluster=replace(job.cluster, device=replace(job.cluster.device, memory=8e9)))
    assert "do not fit into the memory of one device" in plan_generators(small, rl, 5.0).sentences()[-1]


def test_plan_of_the_example_has_generators_and_that_of_samples_has_none():
    result = plan(EXAMPLE, "h100:1")
    record = plan_json(result, 1)["generators"]
    assert record["groups_per_step"] == 2
    assert record["group_seconds"] > 0
    assert record["asynchronous"] >= 1
    assert plan_json(plan("tiny", "h100:1"), 1)["generators"] is None
