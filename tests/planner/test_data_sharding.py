"""The ranks over which parameters are sharded, and that memory, collectives and placements all follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.base.config import Batch
from meshwright.base.hardware.cluster import preset_cluster
from meshwright.base.hardware.links import GroupPlacement
from meshwright.base.models.architecture import Architecture
from meshwright.base.topology.layout import Layout
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.cost.trace.data_parallel_plan import reduce_bytes
from meshwright.planner.cost.units.group_placements import group_placements
from meshwright.planner.cost.units.rank_units import unit_groups
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.trainer_profiles import (
    BRIDGE,
    DEEPSPEED_BF16,
    MEGATRON_2021,
    MEGATRON_2024,
    TORCHTITAN_COMPILED,
)

DENSE = Architecture("dense", 32, 4096, 32, 8, 128, 14336, 128256)
MOE = Architecture("moe", 32, 4096, 32, 8, 128, 14336, 32000, experts=8, experts_active=2, expert_ffn=14336)


def job(model: Architecture, layout: Layout, sharding: str, trainer: TrainerProfile, **changes: object) -> PlannedJob:
    data = layout.data_degree
    planned = PlannedJob(
        model,
        preset_cluster("h100", layout.ranks),
        layout,
        Batch(4 * data, 1, data, 4),
        4096,
        sharding,
        trainer=trainer,
    )
    return replace(planned, **changes)  # type: ignore[arg-type]


def estimate(planned: PlannedJob) -> Estimate:
    return estimate_step(planned, estimate_memory(planned))


def message_bytes(planned: PlannedJob, collective: str, axis: str) -> float:
    calls = [call for call in estimate(planned).calls if (call.collective, call.axis) == (collective, axis)]
    return sum(call.message_bytes * call.calls for call in calls)


@pytest.mark.parametrize(("trainer", "sharding"), [(TORCHTITAN_COMPILED, "parameters"), (BRIDGE, "optimizer")])
def test_context_ranks_that_share_shards_gather_them(trainer: TrainerProfile, sharding: str) -> None:
    """Without data parallelism, eight context-parallel ranks have the same groups as eight data-parallel ranks."""
    context = job(DENSE, Layout(context=8), sharding, trainer)
    data = job(DENSE, Layout(shard=8), sharding, trainer)
    for collective in ("all_gather", "reduce_scatter"):
        gathered = message_bytes(context, collective, "shard+context")
        assert gathered == message_bytes(data, collective, "shard") > 0
    assert message_bytes(context, "all_reduce", "replicate+context") == 0
    parameters, expected = (estimate(each).peak_memory.parameters for each in (context, data))
    assert parameters == expected


def test_context_ranks_are_replicas_if_nothing_is_sharded() -> None:
    planned = job(DENSE, Layout(context=8), "none", BRIDGE)
    assert message_bytes(planned, "all_reduce", "replicate+context") == pytest.approx(2 * DENSE.parameters)
    assert message_bytes(planned, "all_gather", "shard+context") == 0


def test_experts_over_the_tensor_axis_are_on_consecutive_ranks() -> None:
    """Megatron-Core with an expert tensor degree of 1: experts on ranks 0 to 7, which are one node."""
    planned = job(MOE, Layout(shard=32, tensor=2, expert=8), "optimizer", BRIDGE)
    assert group_placements(planned)["expert"] == GroupPlacement(8, 8)
    dense, experts = unit_groups(planned)
    assert (dense.shards, dense.replicas.ranks) == (GroupPlacement(32, 4), 1)
    assert (experts.shards, experts.replicas.ranks) == (GroupPlacement(8, 1), 1)


def test_experts_beside_the_tensor_axis_are_tensor_degree_apart() -> None:
    planned = job(MOE, Layout(shard=32, tensor=2, expert=8), "optimizer", MEGATRON_2024)
    assert group_placements(planned)["expert"] == GroupPlacement(8, 4)
    assert unit_groups(planned)[1].shards == GroupPlacement(4, 1)


def test_experts_over_the_tensor_axis_are_sharded_over_it_without_expert_parallelism() -> None:
    """Every rank has all experts, and the optimizer state of them is divided over all ranks of the stage."""
    planned = job(MOE, Layout(shard=4, tensor=2), "optimizer", BRIDGE)
    dense, experts = unit_groups(planned)
    assert (dense.shards.ranks, experts.shards.ranks) == (4, 8)
    elements = MOE.experts * MOE.expert_parameters * MOE.moe_layers
    state = planned.optimizer_bytes * (elements / 8 + (MOE.parameters - elements) / 2 / 4)
    assert estimate(planned).peak_memory.optimizer == pytest.approx(state, rel=1e-3)


@pytest.mark.parametrize(
    ("trainer", "precision", "sharding", "expected"),
    [
        (BRIDGE, "bf16", "optimizer", 2),
        (BRIDGE, "fp8", "optimizer", 2),
        (MEGATRON_2024, "bf16", "optimizer", 4),
        (MEGATRON_2021, "fp16", "none", 2),
        (MEGATRON_2021, "bf16", "none", 4),
        (DEEPSPEED_BF16, "bf16", "optimizer", 4),
        (DEEPSPEED_BF16, "bf16", "parameters", 2),
    ],
)
def test_bytes_of_a_reduced_gradient_are_those_of_the_trainer(
    trainer: TrainerProfile, precision: str, sharding: str, expected: float
) -> None:
    planned = job(
        DENSE, Layout(shard=8) if sharding != "none" else Layout(replicate=8), sharding, trainer, precision=precision
    )
    assert reduce_bytes(planned) == expected
