"""The cursor in a checkpoint: it is written and read without loss, and wrong values are refused."""

from __future__ import annotations

import copy
import json

import pytest

from meshwright.rl.queue import RolloutCounts, RolloutCursor
from meshwright.rl.queue.recount import recount
from tests.rl.queue.memory_log import MemoryLog
from tests.rl.queue.sample_groups import begin_queue, complete_step, generate_all


def make_cursor() -> RolloutCursor:
    queue = begin_queue(MemoryLog(), staleness=1, policy="fixed")
    generate_all(queue)
    return complete_step(queue, 0).cursor


def test_cursor_is_read_as_it_was_written():
    cursor = make_cursor()
    assert RolloutCursor.from_json(json.loads(json.dumps(cursor.to_json()))) == cursor
    assert RolloutCounts.from_json(cursor.counts.to_json()) == cursor.counts


CHANGES = {
    "not a record": lambda value: [],
    "a field is missing": lambda value: value.pop("step"),
    "another field": lambda value: value.update(more=1),
    "negative step": lambda value: value.update(step=-1),
    "step is a truth value": lambda value: value.update(step=True),
    "frontier is a fraction": lambda value: value.update(frontier=2.0),
    "frontier is huge": lambda value: value.update(frontier=1 << 63),
    "frontier after the groups in flight": lambda value: value.update(frontier=3),
    "position is text": lambda value: value.update(position="1"),
    "position before the groups in flight": lambda value: value.update(position=[1, 0]),
    "groups in flight out of order": lambda value: value["in_flight"].reverse(),
    "no groups in flight": lambda value: value.update(in_flight=[]),
    "group in flight without a position": lambda value: value["in_flight"][0].pop(),
    "groups in flight are not a list": lambda value: value.update(in_flight={}),
    "version after the step": lambda value: value["versions"][-1].__setitem__(2, 9),
    "version of a lost timeline": lambda value: value["versions"][0].__setitem__(1, 7),
    "versions after the frontier": lambda value: value["versions"].pop(0),
    "lineage without timelines": lambda value: value["lineage"].pop("ended"),
    "counts that do not add up": lambda value: value["counts"]["trained"].__setitem__(0, 5),
    "negative count": lambda value: value["counts"]["dropped"]["stale"].__setitem__(0, -1),
    "unknown cause": lambda value: value["counts"]["dropped"].update(other=[0, 0]),
    "counts without a cause": lambda value: value["counts"]["dropped"].pop("stale"),
    "counts are a list": lambda value: value.update(counts=[]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_cursor_is_refused(change):
    value = copy.deepcopy(make_cursor().to_json())
    changed = CHANGES[change](value)
    with pytest.raises(ValueError, match=r"\w+"):
        RolloutCursor.from_json([] if change == "not a record" else value)
    assert changed != value


def test_too_many_groups_in_flight_are_refused(monkeypatch):
    monkeypatch.setattr("meshwright.rl.queue.cursor.MAX_GROUPS", 1)
    with pytest.raises(ValueError, match="at most 1 groups"):
        RolloutCursor.from_json(make_cursor().to_json())


def test_recount_equals_the_counts_of_the_cursor():
    log = MemoryLog()
    queue = begin_queue(log, staleness=1)
    batches = []
    for step in range(3):
        generate_all(queue, lambda number: ("train", "no_signal", "failed")[number % 3])
        batches.append(complete_step(queue, step))
        assert recount(log, batches[-1].cursor, batches, staleness=1) == batches[-1].cursor.counts
