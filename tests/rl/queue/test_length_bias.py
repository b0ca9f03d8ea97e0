"""Long generations are not lost more often than short ones, whatever dies."""

from __future__ import annotations

import random

import pytest

from meshwright.rl.queue import RolloutCursor
from tests.rl.queue.memory_log import MemoryLog
from tests.rl.queue.sample_groups import begin_queue, make_group


def duration(group: int) -> int:
    """Ticks that a generation takes: every fourth prompt takes ten times as long."""
    return 10 if group % 4 == 0 else 1


def kind(group: int) -> str:
    return {5: "no_signal", 6: "failed"}.get(group % 8, "train")


def simulate(seed: int, staleness: int, steps: int = 30):
    """Generators run for as long as their prompt takes and die at a rate per tick, so that long generations are hit
    more often; the learner restarts from one of its last three cursors.
    """
    draw = random.Random(seed)
    log = MemoryLog()
    queue = begin_queue(log, staleness=staleness)
    busy: dict[str, tuple[int, object]] = {}
    batches, timeline, deaths = [], 1, {1: 0, 10: 0}
    for tick in range(20_000):
        if len(batches) == steps:
            return batches, deaths
        for name in "abc":
            if name not in busy and (assignment := queue.assign(name)):
                busy[name] = (tick + duration(assignment.group), assignment)
            if name in busy and draw.random() < 0.04:
                deaths[duration(busy.pop(name)[1].group)] += 1
                queue.release(name)
            elif name in busy and tick >= busy[name][0]:
                _, done = busy.pop(name)
                queue.add([make_group(done.group, done.version, name, kind(done.group), duration(done.group))])
        if draw.random() < 0.01:
            timeline += 1
            batches = batches[: max(0, len(batches) - draw.randint(0, 2))]
            cursor = batches[-1].cursor if batches else RolloutCursor.initial(1)
            queue.begin(cursor, timeline, len(batches))
            queue.publish(queue.lineage.version(len(batches)))
        elif batch := queue.batch(len(batches)):
            batches.append(batch)
            queue.publish(queue.lineage.version(len(batches)))
    raise AssertionError("no progress")


@pytest.mark.parametrize("staleness", [0, 2])
def test_every_prompt_is_trained_or_left_out_by_its_content_only(staleness):
    deaths_of_long = 0
    for seed in range(5):
        batches, deaths = simulate(seed, staleness)
        deaths_of_long += deaths[10]
        frontier = batches[-1].cursor.frontier
        trained = [header.group for batch in batches for header in batch.groups]
        left_out = {header.group: cause for batch in batches for header, cause in batch.dropped}
        assert trained == [group for group in range(frontier) if kind(group) == "train"]
        assert left_out == {group: kind(group) for group in range(frontier) if kind(group) != "train"}
        long = sum(duration(group) == 10 for group in trained)
        assert long == sum(duration(group) == 10 and kind(group) == "train" for group in range(frontier))
    assert deaths_of_long >= 20  # the deaths did hit long generations
