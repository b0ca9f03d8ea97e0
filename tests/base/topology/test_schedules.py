"""Pipeline schedules: orders match torch's, do not deadlock, and have the published bubbles and peaks."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import pytest
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import PipelineStage

from meshwright.base.config.parallelism import ScheduleName
from meshwright.base.topology.schedule_orders import Action, action_orders, flatten_actions
from meshwright.base.topology.schedule_timeline import (
    ActionCosts,
    bubble_formula,
    build_timeline,
    compare_schedules,
    execute_orders,
)
from meshwright.base.topology.schedules import (
    SCHEDULES,
    find_schedule,
    rank_of_stage,
    stages_on_rank,
    validate_schedule,
)
from meshwright.errors import ConfigError
from meshwright.planner.cost.step_time import bubble

STAGES_PER_RANK = {
    name: [stages for stages in (1, 2, 3) if row.min_stages <= stages <= (row.max_stages or 3)]
    for name, row in SCHEDULES.items()
}
GRID = [
    (name, ranks, micro_batches, stages)
    for name in SCHEDULES
    for ranks in (1, 2, 3, 4, 8)
    for micro_batches in (1, 2, 3, 5, 8, 12, 16, 17)
    for stages in STAGES_PER_RANK[name]
]


def torch_schedule(name: str, ranks: int, micro_batches: int, stages: int):
    """Torch's schedule object on mocked stages."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks * stages, None
    schedule = getattr(pipelining, SCHEDULES[name].torch_class)
    return schedule(stage if SCHEDULES[name].single_stage else [stage] * stages, micro_batches)


def torch_actions(name: str, ranks: int, rank: int, actions) -> list[str]:
    """Torch's actions of one rank in the notation of Action."""

    def notation(action) -> str:
        op, micro_batch = action.computation_type.value, action.microbatch_index
        # Torch's table counts the forward passes of 1F1B's last rank from 1; it runs them from 0.
        micro_batch -= name == "1f1b" and rank == ranks - 1 and op == "F"
        return f"{action.stage_index}{op}{micro_batch}"

    compute = [a for a in actions if a is not None and a.computation_type != torch_schedules.REDUCE_GRAD]
    return [f"({';'.join(map(notation, a.sub_actions))})" if a.sub_actions else notation(a) for a in compute]


def test_schedule_table_has_the_names_of_the_config():
    assert tuple(SCHEDULES) == get_args(ScheduleName)
    for name, row in SCHEDULES.items():
        assert row.name == name
        assert row.min_stages <= row.default_stages <= (row.max_stages or row.default_stages)
        assert all(row.min_stages <= stages <= (row.max_stages or stages) for stages in row.candidate_stages)


def test_unknown_schedule_has_no_bubble():
    """The planner's closed form looks the schedule up instead of assuming a bubble for names that it does not know."""
    job = SimpleNamespace(schedule="wave", stages_per_rank=2)
    with pytest.raises(ConfigError, match="unknown pipeline schedule 'wave'"):
        bubble(job, [1.0, 1.0])
    with pytest.raises(ConfigError, match="unknown pipeline schedule 'wave'"):
        bubble_formula("wave", 4, 8, 1)
    with pytest.raises(ConfigError, match="unknown pipeline schedule 'wave'"):
        rank_of_stage("wave", 4, 1)


@pytest.mark.parametrize(("name", "stages", "expected"), [("zbv", 2, 1 / 6), ("interleaved", 4, 1 / 4), ("1f1b", 1, 1)])
def test_planner_bubble_reads_the_schedule_table(name, stages, expected):
    job = SimpleNamespace(schedule=name, stages_per_rank=stages)
    assert bubble(job, [1.0, 1.0]) == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_action_orders_equal_torch_schedules(name):
    """Where torch refuses a number of micro-batches, validate_schedule does too."""
    compared = 0
    for _, ranks, micro_batches, stages in (case for case in GRID if case[0] == name):
        try:
            orders = [[str(step) for step in order] for order in action_orders(name, ranks, micro_batches, stages)]
        except ConfigError:
            with pytest.raises(ValueError, match=r"(?i)microbatches"):
                torch_schedule(name, ranks, micro_batches, stages)
            continue
        table = torch_schedule(name, ranks, micro_batches, stages).pipeline_order
        expected = [torch_actions(name, ranks, rank, table[rank]) for rank in range(ranks)]
        assert orders == expected, (ranks, micro_batches, stages)
        compared += 1
    assert compared >= 15


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "stages"), GRID)
def test_every_micro_batch_passes_every_stage_once_without_deadlock(name, ranks, micro_batches, stages):
    try:
        orders = action_orders(name, ranks, micro_batches, stages)
    except ConfigError:
        return
    for rank, order in enumerate(orders):
        actions = sorted((a.stage, a.micro_batch, a.op) for a in flatten_actions(order))
        passes = [(stage, i) for stage in stages_on_rank(name, ranks, rank, stages) for i in range(micro_batches)]
        full_backward = {(stage, i) for stage, i, op in actions if op == "B"}
        assert actions == sorted((*p, op) for p in passes for op in ("FB" if p in full_backward else "FIW"))
    execute_orders(orders, ranks * stages, lambda action: ActionCosts(3, 1, 2).slots(action.op))  # raises on deadlock


def test_execute_orders_reports_a_deadlock():
    backward_first = [[Action(0, "B", 0), Action(0, "F", 0)]]
    with pytest.raises(ValueError, match=r"deadlock: ranks \[0\] wait for each other; rank 0 is to run 0B0"):
        execute_orders(backward_first, 1, lambda action: ActionCosts().slots(action.op))


@pytest.mark.parametrize("name", SCHEDULES)
def test_rank_of_stage_is_the_inverse_of_stages_on_rank(name):
    for stages in STAGES_PER_RANK[name]:
        owners = {stage: rank for rank in range(4) for stage in stages_on_rank(name, 4, rank, stages)}
        assert sorted(owners) == list(range(4 * stages))
        assert owners == {stage: rank_of_stage(name, 4, stage) for stage in owners}
        if not find_schedule(name).single_stage:
            assert owners == torch_schedule(name, 4, 8, stages).stage_index_to_group_rank


def test_v_shaped_schedule_gives_rank_0_the_first_and_the_last_stage():
    assert [stages_on_rank("zbv", 4, rank, 2) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [stages_on_rank("interleaved", 2, rank, 3) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_bubbles_of_four_ranks_and_eight_micro_batches():
    assert {name: build_timeline(name, 4, 8).bubble for name in SCHEDULES} == {
        "gpipe": Fraction(3, 11),
        "1f1b": Fraction(3, 11),
        "interleaved": Fraction(3, 19),
        "zero-bubble": Fraction(1, 17),
        "zbv": Fraction(1, 17),
        "dualpipev": Fraction(1, 9),
    }


@pytest.mark.parametrize("costs", [ActionCosts(), ActionCosts(2, 3, 1), ActionCosts(0.5, 1, 0.25)])
def test_bubble_formula_equals_the_bubble_of_the_timeline(costs):
    with_formula = 0
    for name, ranks, micro_batches, stages in GRID:
        formula = bubble_formula(name, ranks, micro_batches, stages, costs)
        try:
            counted = build_timeline(name, ranks, micro_batches, stages, costs).bubble
        except ConfigError:
            continue
        assert formula is None or formula[1] == counted, (name, ranks, micro_batches, stages)
        with_formula += formula is not None
    assert with_formula > 80


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (4, 8), (4, 4), (8, 16)])
def test_1f1b_keeps_one_micro_batch_per_remaining_stage_in_flight_and_gpipe_keeps_all(ranks, micro_batches):
    timeline = build_timeline("1f1b", ranks, micro_batches)
    assert timeline.rank_peaks == [min(ranks - stage, micro_batches) for stage in range(ranks)]
    assert timeline.stage_peaks == [{stage: min(ranks - stage, micro_batches)} for stage in range(ranks)]
    assert build_timeline("gpipe", ranks, micro_batches).rank_peaks == [micro_batches] * ranks


def test_split_backward_keeps_a_micro_batch_in_flight_until_its_weight_gradient():
    assert build_timeline("zbv", 4, 8).rank_peaks == [8] * 4
    assert build_timeline("zbv", 4, 8).stage_peaks[0] == {0: 8, 7: 1}
    # 1F1B has 4, 3, 2, 1: deferred weight gradients cost activation memory on the later ranks.
    assert build_timeline("zero-bubble", 4, 8, 1).normalized_peaks == [4] * 4
    assert build_timeline("dualpipev", 4, 16).normalized_peaks == [Fraction(9, 2)] * 4


def test_idle_and_busy_slots_add_up_to_the_makespan():
    for name in SCHEDULES:
        timeline = build_timeline(name, 4, 8, costs=ActionCosts(2, 3, 1))
        for row, idle in zip(timeline.rows, timeline.idle, strict=True):
            assert sum(slot.end - slot.start for slot in row) + idle == timeline.makespan
            assert all(slot.end <= following.start for slot, following in pairwise(row))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("wave", 4, 8, 1), "unknown pipeline schedule 'wave'; expected one of gpipe, 1f1b"),
        (("gpipe", 4, 8, 2), "does not support 2 stages per rank; expected 1"),
        (("interleaved", 4, 8, 1), "does not support 1 stages per rank; expected 2 or more"),
        (("zbv", 4, 8, 3), "does not support 3 stages per rank; expected 2"),
        (("1f1b", 4, 3, 1), "expected 4 micro-batches or more"),
        (("dualpipev", 4, 7, 2), "expected 8 micro-batches or more"),
        (("interleaved", 4, 11, 2), "into 2 rounds of at least 4; expected 10 or 12 micro-batches"),
        (("zero-bubble", 2, 7, 1), "expected 6 or 8 micro-batches"),
        (("gpipe", 0, 8, 1), "is empty; expected at least 1 of each"),
        (("gpipe", 4, -1, 1), "is empty"),
    ],
)
def test_validate_schedule_names_the_nearest_valid_numbers(arguments, message):
    with pytest.raises(ConfigError) as error:
        validate_schedule(*arguments)
    assert message in str(error.value)


@pytest.mark.parametrize("size", [(257, 1), (4, 4097), (128, 1024), (10**12, 10**12)])
def test_timeline_size_is_bounded(size):
    with pytest.raises(ConfigError, match="too large"):
        build_timeline("gpipe", *size)
    with pytest.raises(ConfigError, match="too large"):
        raise next(iter(compare_schedules(*size).values()))


@pytest.mark.parametrize("costs", [(0, 1, 1), (1, -1, 1), (1, 1, float("nan"))])
def test_action_costs_must_be_positive_and_finite(costs):
    with pytest.raises(ConfigError, match="expected a finite number above 0"):
        ActionCosts(*costs)
