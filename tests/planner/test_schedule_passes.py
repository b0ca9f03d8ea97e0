"""The passes of a step are counted without walking all of it, and the counts are those of the whole schedule."""

from __future__ import annotations

from collections import Counter

import pytest

from meshwright.base.topology.schedules import SCHEDULES
from meshwright.planner.cost.trace.schedule_passes import ScheduleSize, passes_per_step, schedule_passes

RESHARDING = ("local", "once", "stays", "micro_step", "reshards")


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_counted_passes_are_those_of_the_whole_schedule(kind: str, ranks: int) -> None:
    """Published runs also have numbers of micro-batches that their rounds do not divide, which torch refuses."""
    schedule, rank = SCHEDULES[kind], ranks // 2
    for stages in schedule.candidate_stages[:3]:
        for micro_batches in range(schedule.min_micro_batches(ranks), 28):
            size = ScheduleSize(kind, ranks, micro_batches, stages)
            for resharding in RESHARDING:
                counts = Counter(dict(passes_per_step(size, rank, resharding)))
                assert counts == Counter(schedule_passes(size, rank, resharding)), (size, resharding)
                by_op = Counter[str]()
                for passed, count in counts.items():
                    by_op[passed.op] += count
                every = micro_batches * stages
                assert by_op["F"] == by_op["B"] + by_op["I"] == by_op["B"] + by_op["W"] == every, (size, resharding)
