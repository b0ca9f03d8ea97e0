"""Costs of experts: token copies, overlap of all-to-alls, uneven load, and the host time of MoE layers."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from math import isclose
from operator import sub

import pytest

from meshwright.base.config import Batch
from meshwright.base.hardware.all_to_all import distinct_groups, token_copies
from meshwright.base.hardware.cluster import preset_cluster
from meshwright.base.hardware.links import GroupPlacement, token_all_to_all_seconds
from meshwright.base.topology.layout import Layout
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.terms.expert_overlap import exposed_all_to_all
from meshwright.planner.cost.terms.host_time import forward_kernels, host_seconds
from meshwright.planner.cost.terms.kernel_time import (
    KernelRate,
    grouped_matmul_time,
    matmul_time,
    weight_gradient_time,
)
from meshwright.planner.cost.terms.layer_time import layer_shape, layer_time
from meshwright.planner.cost.trace.activation_messages import ActivationMessages
from meshwright.planner.search.candidate import Candidate, candidate_job
from meshwright.planner.workload.expert_loads import rank_imbalance
from meshwright.planner.workload.expert_settings import DUALPIPE, release_of, with_expert_settings
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.trainer_profiles import BRIDGE, MESHWRIGHT_COMPILED
from tests.planner.planned_cases import untrainable_workload


def moe_job(device: str = "h100", expert: int = 16, **changes: object) -> PlannedJob:
    layout = Layout(1, 1, 16, 1, 1, expert)
    job = PlannedJob(
        untrainable_workload().model, preset_cluster(device, 16), layout, Batch(64, 1, 16, 4), 4096, "optimizer"
    )  # fmt: skip
    return replace(job, **{"trainer": BRIDGE, **changes})  # type: ignore[arg-type]


def test_distinct_groups_equals_an_enumeration() -> None:
    experts, groups, active = 8, 4, 3
    chosen = list(combinations(range(experts), active))
    mean = sum(len({expert * groups // experts for expert in choice}) for choice in chosen) / len(chosen)
    assert isclose(distinct_groups(groups, experts, active), mean)


def test_flat_all_to_all_sends_every_copy_that_leaves_the_rank() -> None:
    copies = token_copies(64, 6, 16, 8, hierarchical=False)
    assert isclose(copies.total, 6 * 15 / 16)
    assert isclose(copies.across_nodes, 6 * 8 / 16)


def test_hierarchical_all_to_all_sends_a_token_to_a_node_once() -> None:
    flat, hierarchical = token_copies(64, 6, 16, 8, False), token_copies(64, 6, 16, 8, True)
    assert hierarchical.across_nodes < 1 < flat.across_nodes
    assert hierarchical.inside_node < 6


def test_node_limited_routing_bounds_the_network_copies() -> None:
    """DeepSeek-V3 chooses the experts of a token from four of eight nodes."""
    unlimited = token_copies(256, 8, 64, 8, True)
    limited = token_copies(256, 8, 64, 8, True, node_limit=4)
    assert limited.across_nodes < 4 * 7 / 8 < unlimited.across_nodes


def test_token_all_to_all_across_nodes_is_bound_by_the_network() -> None:
    cluster, placement = preset_cluster("h100", 16), GroupPlacement(16, 8)
    copies = token_copies(64, 6, 16, 8, False)
    seconds = token_all_to_all_seconds(cluster, 1e9, copies, placement)
    assert seconds == pytest.approx(3e9 / 40e9, rel=0.01)


def test_overlap_hides_no_more_than_the_other_micro_batch_computes() -> None:
    assert exposed_all_to_all(4.0, 0.0, 10.0) == 4.0
    assert exposed_all_to_all(4.0, 1.0, 10.0) == 0.0
    assert exposed_all_to_all(4.0, 1.0, 3.0) == 1.0
    assert exposed_all_to_all(4.0, 0.5, 10.0) == 2.0
    overlapped = estimate(moe_job(trainer=replace(BRIDGE, expert_overlap=1.0, contention=0.15)))
    exposed = estimate(moe_job(trainer=replace(BRIDGE, expert_overlap=0.0)))
    assert overlapped.phases.get("expert", 0.0) < 0.5 * exposed.phases["expert"]
    assert overlapped.phases["contention"] > exposed.phases.get("contention", 0.0)  # it is not free


def test_all_to_alls_hide_behind_a_pass_of_the_other_direction() -> None:
    """Another micro-batch runs backward during a forward pass: dispatch and combine hide behind half of it each."""
    job = moe_job(trainer=replace(BRIDGE, expert_overlap=1.0))
    slow = replace(job.cluster, inter_node=replace(job.cluster.inter_node, bandwidth=1e8))
    job = replace(job, cluster=slow)
    shape = layer_shape(job)
    layer = layer_time(shape, True)
    assert layer.forward < 0.7 * layer.backward
    messages = ActivationMessages(job, shape).expert(True, layer)
    assert [message.hidden for message in messages.forward] == pytest.approx([layer.backward / 2] * 2)
    assert [message.hidden for message in messages.backward] == pytest.approx([layer.forward / 2] * 2)
    assert min(message.seconds for message in messages.forward) > layer.backward  # more than can be hidden


def test_a_candidate_has_the_imbalance_of_its_workload() -> None:
    work = replace(untrainable_workload(), expert_imbalance=1.4)
    candidate = Candidate(Layout(1, 1, 16, 1, 1, 16), 1, "optimizer")
    assert candidate_job(work, preset_cluster("h100", 16), candidate).expert_imbalance == 1.4


def test_imbalance_of_measured_loads_is_that_of_ranks() -> None:
    assert rank_imbalance([[5, 5, 5, 5]], 2) == 1.0
    assert rank_imbalance([[9, 1, 9, 1]], 2) == 1.0  # each rank has a busy and an idle expert
    assert rank_imbalance([[9, 1, 9, 1]], 4) == 1.8
    assert rank_imbalance([[6, 2], [4, 4], [0, 0]], 2) == 1.25
    assert rank_imbalance([], 8) == 1.0


def test_an_uneven_load_costs_time_and_memory() -> None:
    even, uneven = estimate(moe_job()), estimate(moe_job(expert_imbalance=1.5))
    assert uneven.seconds > 1.05 * even.seconds
    assert uneven.peak_memory.activations > 1.1 * even.peak_memory.activations
    assert uneven.phases["expert"] == pytest.approx(1.5 * even.phases["expert"], rel=0.05)


def test_a_trainer_that_saves_one_copy_of_a_routed_token_needs_less_memory() -> None:
    """Megatron applies routing weights before the last matmul, so that it saves no output of an expert."""
    copies = {
        saved: estimate(moe_job(trainer=replace(BRIDGE, saved_token_copies=saved))).peak_memory.activations
        for saved in (0, 1)
    }
    job = moe_job()
    token = 26 * 4096 * job.model.experts_active * job.model.width * 2  # of 26 MoE layers
    assert copies[0] - copies[1] == pytest.approx(2 * token, rel=0.15)


def test_recomputed_latent_projections_trade_memory_for_time() -> None:
    saved, recomputed = (
        estimate(moe_job(trainer=replace(BRIDGE, recomputes_latent_projections=recomputes)))
        for recomputes in (False, True)
    )
    assert recomputed.peak_memory.activations < 0.9 * saved.peak_memory.activations
    assert recomputed.phases["recompute"] > 0 == saved.phases.get("recompute", 0)


def test_grouped_matmuls_with_few_rows_per_expert_are_slow() -> None:
    rate = KernelRate(683e12, 4.1e12, 132, 2)
    whole = matmul_time(rate, 32768, 4096, 4096)
    assert grouped_matmul_time(rate, 4096, 4096, 4096, 8) < 1.15 * whole
    assert grouped_matmul_time(rate, 128, 4096, 4096, 256) > 1.4 * whole
    assert grouped_matmul_time(rate, 4096, 4096, 4096, 1) == matmul_time(rate, 4096, 4096, 4096)


def test_a_number_of_tokens_is_no_length_of_rows_in_memory() -> None:
    """Weight gradients multiply over tokens, whose rows have the length of features. Only these may be misaligned."""
    rate = KernelRate(683e12, 4.1e12, 132, 2)
    aligned = weight_gradient_time(rate, 4096, 14336, 4096, 8)
    assert weight_gradient_time(rate, 4097, 14336, 4096, 8) == pytest.approx(aligned, rel=1e-3)
    assert weight_gradient_time(rate, 4096, 14337, 4096, 8) > 2 * aligned
    assert weight_gradient_time(rate, 4096, 14336, 4097, 8) > 2 * aligned


def test_a_layer_takes_longer_with_every_higher_load_of_the_busiest_rank() -> None:
    """Most of these loads make a number of tokens that no power of two divides."""
    loads = [1 + step / 20 for step in range(21)]
    times = [layer_time(layer_shape(moe_job(expert_imbalance=load)), True) for load in loads]
    assert all(lower.backward <= higher.backward for lower, higher in pairwise(times))
    assert times[-1].backward < 2 * times[0].backward


def test_float8_speeds_experts_up_only_where_the_trainer_quantizes_them() -> None:
    """Meshwright's float8 layers leave experts and routers in bf16; those of Megatron-Bridge do not."""

    def saved_seconds(trainer: TrainerProfile, experts_active: int) -> float:
        job = moe_job(trainer=replace(trainer, layer_launch_seconds=0.0, moe_layer_launch_seconds=0.0))
        job = replace(job, model=replace(job.model, experts_active=experts_active))
        times = (layer_time(layer_shape(replace(job, precision=precision)), True) for precision in ("bf16", "fp8"))
        return sub(*(time.forward + time.backward for time in times))

    assert saved_seconds(MESHWRIGHT_COMPILED, 16) == pytest.approx(saved_seconds(MESHWRIGHT_COMPILED, 1))
    assert saved_seconds(BRIDGE, 16) > 2 * saved_seconds(BRIDGE, 1)


def test_share_of_the_peak_relates_to_the_precision_of_most_flops() -> None:
    peaks = {}
    for name, trainer in {"bf16 experts": MESHWRIGHT_COMPILED, "8-bit experts": BRIDGE}.items():
        job = moe_job(trainer=trainer, precision="fp8")
        job = replace(job, model=replace(job.model, width=7168, vocab=32768, experts_active=16))
        peaks[name] = estimate(job).peak_precision
    assert peaks == {"bf16 experts": "bf16", "8-bit experts": "fp8"}


def test_host_time_follows_the_number_of_kernels() -> None:
    eager, fused = forward_kernels(False), forward_kernels(True)
    assert fused < eager / 2
    assert forward_kernels(True, moe=True) > 2 * fused
    assert forward_kernels(True, quantized=True) > fused
    assert host_seconds(1e-3, eager, eager) == 1e-3
    assert host_seconds(1e-3, eager, eager, graphed=1.0) < 1e-4
    assert host_seconds(1e-3, eager, eager, host_speed=0.5) == 2e-3


def test_collectives_run_while_the_device_waits_for_the_host() -> None:
    bound = moe_job(trainer=replace(BRIDGE, moe_layer_launch_seconds=50e-3))
    layer = layer_time(layer_shape(bound), True)
    assert layer.forward_idle > 0.5 * layer.forward
    assert "expert" not in estimate(bound).phases


def test_expert_settings_follow_the_release() -> None:
    assert release_of("docs/performance-summary.md line 45 (26.08 container)") == (26, 8)
    assert release_of("Narayanan et al.") is None
    old, new = (with_expert_settings(BRIDGE, release, False, True) for release in ((26, 4), (26, 6)))
    assert old.expert_overlap == 0 < new.expert_overlap
    assert old.graphed_kernels == 0 < new.graphed_kernels
    assert with_expert_settings(BRIDGE, (26, 6), False, False).graphed_kernels == 0
    assert with_expert_settings(BRIDGE, (26, 4), True, True).graphed_kernels > 0
    assert with_expert_settings(BRIDGE, None, True, True) == BRIDGE


def test_dualpipe_hides_the_all_to_alls_of_experts_across_nodes() -> None:
    """DeepSeek-V3's trainer on H800s, with experts on two nodes."""
    plain, dualpipe = (
        estimate(moe_job(device="h800", trainer=replace(BRIDGE, **changes))) for changes in ({}, DUALPIPE)
    )
    assert dualpipe.phases.get("expert", 0.0) < 0.2 * plain.phases["expert"]
    assert dualpipe.phases["contention"] > plain.phases.get("contention", 0.0)
