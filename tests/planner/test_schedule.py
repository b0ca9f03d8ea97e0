"""Pipeline schedules: the orders are torch's own, they cannot hang, and their bubbles and peaks are the known ones."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from unittest import mock

import pytest
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining.stage import PipelineStage

from meshwright.errors import ConfigError
from meshwright.topology.schedule_timeline import (
    ActionCosts,
    bubble_formula,
    build_timeline,
    compare_schedules,
    execute_orders,
)
from meshwright.topology.schedules import (
    KINDS,
    Action,
    action_orders,
    flatten_actions,
    rank_of_stage,
    stages_on_rank,
    validate_schedule,
)

TORCHS = {
    "gpipe": torchs.ScheduleGPipe,
    "1f1b": torchs.Schedule1F1B,
    "interleaved": torchs.ScheduleInterleaved1F1B,
    "zero-bubble": torchs.ScheduleInterleavedZeroBubble,
    "zbv": torchs.ScheduleZBVZeroBubble,
    "dualpipev": torchs.ScheduleDualPipeV,
}
STAGES = {"gpipe": [1], "1f1b": [1], "interleaved": [2, 3], "zero-bubble": [1, 2, 3], "zbv": [2], "dualpipev": [2]}
GRID = [
    (kind, ranks, micros, each)
    for kind in KINDS
    for ranks in (1, 2, 3, 4, 8)
    for micros in (1, 2, 3, 5, 8, 12, 16, 17)
    for each in STAGES[kind]
]


def from_torch(kind: str, ranks: int, micros: int, each: int):
    """Torch's schedule object, on stages that hold nothing."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, ranks, ranks * each, None
    return TORCHS[kind](stage if STAGES[kind] == [1] else [stage] * each, micros)


def words(kind: str, ranks: int, rank: int, steps) -> list[str]:
    def word(action) -> str:
        what, micro = action.computation_type.value, action.microbatch_index
        # Torch's table counts the last rank's F of 1F1B from 1; the steps that it runs count from 0.
        return f"{action.stage_index}{what}{micro - (kind == '1f1b' and rank == ranks - 1 and what == 'F')}"

    computed = [a for a in steps if a is not None and a.computation_type != torchs.REDUCE_GRAD]
    return [f"({';'.join(map(word, a.sub_actions))})" if a.sub_actions else word(a) for a in computed]


@pytest.mark.parametrize("kind", KINDS)
def test_the_orders_are_torchs_own_and_so_are_the_refusals(kind):
    compared = 0
    for _, ranks, micros, each in (place for place in GRID if place[0] == kind):
        try:
            own = [[str(step) for step in order] for order in action_orders(kind, ranks, micros, each)]
        except ConfigError:
            with pytest.raises(ValueError, match=r"(?i)microbatches"):
                from_torch(kind, ranks, micros, each)
            continue
        table = from_torch(kind, ranks, micros, each).pipeline_order
        assert own == [words(kind, ranks, rank, table[rank]) for rank in range(ranks)], (ranks, micros, each)
        compared += 1
    assert compared >= 15


@pytest.mark.parametrize(("kind", "ranks", "micros", "each"), GRID)
def test_every_micro_batch_passes_every_stage_once_and_nobody_waits_for_ever(kind, ranks, micros, each):
    try:
        found = action_orders(kind, ranks, micros, each)
    except ConfigError:
        return
    for rank, order in enumerate(found):
        done = sorted((a.stage, a.micro_batch, a.op) for a in flatten_actions(order))
        places = [(stage, micro) for stage in stages_on_rank(kind, ranks, rank, each) for micro in range(micros)]
        whole = {(s, m) for s, m, what in done if what == "B"}
        assert done == sorted((*p, what) for p in places for what in ("FB" if p in whole else "FIW"))
    execute_orders(
        found, ranks * each, lambda action: ActionCosts(3, 1, 2).slots(action.op)
    )  # raises where ranks wait for each other


def test_an_order_that_would_hang_is_found():
    backward_first = [[Action(0, "B", 0), Action(0, "F", 0)]]
    with pytest.raises(ValueError, match=r"ranks \[0\] wait for each other for ever, rank 0 to run 0B0"):
        execute_orders(backward_first, 1, lambda action: ActionCosts().slots(action.op))


@pytest.mark.parametrize("kind", KINDS)
def test_the_holder_of_a_stage_is_the_rank_that_holds_it(kind):
    for each in STAGES[kind]:
        held = {stage: rank for rank in range(4) for stage in stages_on_rank(kind, 4, rank, each)}
        assert sorted(held) == list(range(4 * each))
        assert held == {stage: rank_of_stage(kind, 4, stage) for stage in held}
        if STAGES[kind] != [1]:
            assert held == from_torch(kind, 4, 8, each).stage_index_to_group_rank


def test_the_v_comes_back_to_rank_0():
    assert [stages_on_rank("zbv", 4, rank, 2) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [stages_on_rank("interleaved", 2, rank, 3) for rank in range(2)] == [[0, 2, 4], [1, 3, 5]]


def test_the_bubbles_of_four_ranks_and_eight_micro_batches():
    bubbles = {kind: build_timeline(kind, 4, 8).bubble for kind in KINDS}
    assert bubbles == {
        "gpipe": Fraction(3, 11),
        "1f1b": Fraction(3, 11),
        "interleaved": Fraction(3, 19),
        "zero-bubble": Fraction(1, 17),
        "zbv": Fraction(1, 17),
        "dualpipev": Fraction(1, 9),
    }


@pytest.mark.parametrize("costs", [ActionCosts(), ActionCosts(2, 3, 1), ActionCosts(0.5, 1, 0.25)])
def test_where_a_formula_is_given_it_is_the_counted_bubble(costs):
    known = 0
    for kind, ranks, micros, each in GRID:
        exact = bubble_formula(kind, ranks, micros, each, costs)
        try:
            counted = build_timeline(kind, ranks, micros, each, costs).bubble
        except ConfigError:
            continue
        assert exact is None or exact[1] == counted, (kind, ranks, micros, each)
        known += exact is not None
    assert known > 80


@pytest.mark.parametrize(("ranks", "micros"), [(2, 2), (4, 8), (4, 4), (8, 16)])
def test_1f1b_holds_as_many_micro_batches_as_there_are_stages_to_come_and_gpipe_all(ranks, micros):
    one = build_timeline("1f1b", ranks, micros)
    assert one.rank_peaks == [min(ranks - stage, micros) for stage in range(ranks)]
    assert one.stage_peaks == [{stage: min(ranks - stage, micros)} for stage in range(ranks)]
    assert build_timeline("gpipe", ranks, micros).rank_peaks == [micros] * ranks


def test_a_split_backward_holds_until_its_weights_are_done():
    assert build_timeline("zbv", 4, 8).rank_peaks == [8] * 4
    assert build_timeline("zbv", 4, 8).stage_peaks[0] == {0: 8, 7: 1}
    assert (
        build_timeline("zero-bubble", 4, 8, 1).normalized_peaks == [4] * 4
    )  # 1F1B holds 4, 3, 2, 1: the price of late W
    assert build_timeline("dualpipev", 4, 16).normalized_peaks == [Fraction(9, 2)] * 4


def test_idle_and_work_make_up_the_makespan():
    for kind in KINDS:
        found = build_timeline(kind, 4, 8, costs=ActionCosts(2, 3, 1))
        for row, idle in zip(found.rows, found.idle, strict=True):
            assert sum(slot.end - slot.start for slot in row) + idle == found.makespan
            assert all(one.end <= other.start for one, other in pairwise(row))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("wave", 4, 8, 1), "unknown schedule 'wave'; allowed: gpipe, 1f1b"),
        (("gpipe", 4, 8, 2), "cannot have 2 stages a rank; allowed: 1"),
        (("interleaved", 4, 8, 1), "cannot have 1 stages a rank; allowed: 2 or more"),
        (("zbv", 4, 8, 3), "cannot have 3 stages a rank; allowed: 2"),
        (("1f1b", 4, 3, 1), "allowed: 4 micro-batches or more"),
        (("dualpipev", 4, 7, 2), "allowed: 8 micro-batches or more"),
        (("interleaved", 4, 11, 2), "into 2 rounds of 4 or more; allowed: 10, 12"),
        (("zero-bubble", 2, 7, 1), "allowed: 6, 8"),
        (("gpipe", 0, 8, 1), "make no pipeline; allowed: 1 or more of each"),
        (("gpipe", 4, -1, 1), "make no pipeline"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(place, said):
    with pytest.raises(ConfigError) as refused:
        validate_schedule(*place)
    assert said in str(refused.value)


@pytest.mark.parametrize("size", [(257, 1), (4, 4097), (128, 1024), (10**12, 10**12)])
def test_a_timeline_has_an_end(size):
    with pytest.raises(ConfigError, match="too large"):
        build_timeline("gpipe", *size)
    with pytest.raises(ConfigError, match="too large"):
        raise next(iter(compare_schedules(*size).values()))


@pytest.mark.parametrize("costs", [(0, 1, 1), (1, -1, 1), (1, 1, float("nan"))])
def test_costs_that_are_none_are_refused(costs):
    with pytest.raises(ConfigError, match="allowed: more than 0"):
        ActionCosts(*costs)
