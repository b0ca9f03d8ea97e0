"""The rules of the rollout queue, one by one."""

from __future__ import annotations

import pytest

from meshwright.errors import DataError
from meshwright.rl.queue import Amount, FilterBudgetExceeded, RolloutCursor, RolloutQueue, RolloutQueueError
from meshwright.rl.version import PolicyVersion
from tests.rl.queue.memory_log import MemoryLog
from tests.rl.queue.sample_groups import (
    begin_queue,
    complete_step,
    generate_all,
    make_group,
    make_settings,
    numbers,
    prompt_id,
)

FIRST = PolicyVersion(1, 0)


def verdicts(queue, *groups):
    return [receipt.verdict for receipt in queue.add(groups)]


@pytest.fixture
def log():
    return MemoryLog()


def test_batch_has_the_groups_in_the_order_of_their_numbers_whatever_the_arrival(log):
    queue = begin_queue(log, staleness=1)
    assert verdicts(queue, *(make_group(number, FIRST) for number in (3, 1, 0, 2))) == ["accepted"] * 4
    batch = queue.batch(0)
    assert numbers(batch) == [0, 1]
    assert batch.positions == [log.position(2), log.position(1)]
    assert queue.batch(0) is batch


def test_batch_waits_for_the_lowest_group(log):
    queue = begin_queue(log, staleness=1)
    queue.add([make_group(number, FIRST) for number in (1, 2, 3)])
    assert queue.batch(0) is None


def test_batch_of_another_step_is_an_error(log):
    queue = begin_queue(log)
    with pytest.raises(RolloutQueueError, match="batch of step 1, and 0 steps are completed"):
        queue.batch(1)
    generate_all(queue)
    complete_step(queue, 0)
    with pytest.raises(RolloutQueueError, match="batch of step 0, and 1 steps are completed"):
        queue.batch(0)


def test_version_that_skips_a_step_or_has_another_timeline_cannot_be_published(log):
    queue = begin_queue(log)
    for version in (PolicyVersion(1, 1), PolicyVersion(1, 2), PolicyVersion(2, 0)):
        with pytest.raises(RolloutQueueError, match="publishes policy version"):
            queue.publish(version)


def test_calls_before_the_first_attempt(log):
    queue = RolloutQueue(make_settings(), log, prompt_id)
    assert queue.assign("a") is None
    assert queue.policies_needed() == set()
    assert queue.status() == {"attempt": None}
    for call in (lambda: queue.batch(0), lambda: queue.add([make_group(0, FIRST)]), lambda: queue.publish(FIRST)):
        with pytest.raises(RolloutQueueError):
            call()


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_generators_wait_when_the_window_is_full(log, staleness):
    queue = begin_queue(log, staleness=staleness)
    assert generate_all(queue) == list(range((staleness + 1) * 2))
    assert queue.assign("a") is None
    complete_step(queue, 0)
    assert len(generate_all(queue)) == 2


def test_groups_without_signal_or_reward_are_consumed_and_recorded(log):
    queue = begin_queue(log)
    kinds = {0: "no_signal", 1: "failed", 2: "train", 3: "no_signal"}
    generate_all(queue, lambda number: kinds.get(number, "train"))
    batch = queue.batch(0)
    assert numbers(batch) == [2, 4]
    assert [(header.group, cause) for header, cause in batch.dropped] == [
        (0, "no_signal"),
        (1, "failed"),
        (3, "no_signal"),
    ]
    assert batch.cursor.frontier == 5
    assert batch.cursor.counts.dropped["no_signal"] == Amount(4, 4)
    assert batch.cursor.counts.conserved


def test_groups_without_signal_are_trained_without_dynamic_sampling(log):
    queue = begin_queue(log, dynamic_sampling=False)
    generate_all(queue, lambda number: "no_signal")
    assert numbers(queue.batch(0)) == [0, 1]


def test_window_is_extended_by_the_deficit_only_when_it_is_complete(log):
    queue = begin_queue(log)
    queue.add([make_group(1, FIRST, kind="no_signal")])
    assert queue.status()["extension"] == 0
    queue.add([make_group(0, FIRST)])
    assert queue.status()["extension"] == 1
    queue.add([make_group(2, FIRST, kind="failed")])
    assert queue.status()["extension"] == 2
    queue.add([make_group(3, FIRST)])
    complete_step(queue, 0)
    status = queue.status()
    assert (status["frontier"], status["extension"]) == (4, 0)


def test_filter_budget_stops_the_run(log):
    queue = begin_queue(log, filter_budget=3)
    while queue.status()["present"] < 4:
        generate_next = queue.assign("a")
        queue.add([make_group(generate_next.group, FIRST, kind="no_signal")])
        if queue.status()["present"] < 4:
            assert queue.batch(0) is None
    for _ in range(2):
        with pytest.raises(
            FilterBudgetExceeded,
            match=r"4 groups in a row .* rl.filter_budget = 3: 4 have equal rewards \(mean 1\).*learnt",
        ):
            queue.batch(0)


def test_filter_budget_names_the_reward_if_it_fails(log):
    queue = begin_queue(log, filter_budget=1)
    queue.add([make_group(number, FIRST, kind="failed") for number in (0, 1)])
    with pytest.raises(FilterBudgetExceeded, match="2 have no reward; try the reward function"):
        queue.batch(0)


def test_duplicate_is_recorded_and_dropped(log):
    queue = begin_queue(log)
    assert verdicts(queue, make_group(0, FIRST), make_group(0, FIRST, "b", length=5)) == ["accepted", "duplicate"]
    generate_all(queue)
    batch = complete_step(queue, 0)
    assert len(log.payloads) == 3
    assert batch.cursor.counts.dropped["duplicate"] == Amount(2, 10)
    assert verdicts(queue, make_group(1, FIRST)) == ["stale"]  # consumed, and too old for the next step


def test_consumed_group_is_a_duplicate_within_the_staleness_bound(log):
    queue = begin_queue(log, staleness=1)
    generate_all(queue)
    complete_step(queue, 0)
    assert verdicts(queue, make_group(1, FIRST)) == ["duplicate"]


def test_stale_group_is_dropped_when_it_arrives_or_when_its_step_is_too_late(log):
    queue = begin_queue(log, staleness=1)
    for step in range(2):
        generate_all(queue)
        complete_step(queue, step)
    version = PolicyVersion(1, 1)  # a generator with an old policy
    assert verdicts(queue, make_group(7, FIRST), make_group(7, version)) == ["stale", "accepted"]
    generate_all(queue)
    batch = complete_step(queue, 2)
    assert batch.cursor.counts.dropped["stale"] == Amount(4, 4)
    assert 7 not in dict(batch.cursor.in_flight)
    assert generate_all(queue)[0] == 7  # it is generated again, before the others
    assert numbers(complete_step(queue, 3)) == [6, 7]


@pytest.mark.parametrize(
    ("group", "verdict", "reason"),
    [
        (make_group(2, FIRST), "not_permitted", "expected a group before 2"),
        (make_group(0, FIRST, size=3), "invalid", "expected 2 rollouts, found 3"),
        (make_group(0, FIRST, prompt=5), "invalid", "expected prompt 1000, found prompt 5"),
        (make_group(0, PolicyVersion(1, 1)), "invalid", "policy version 1.1 was never published"),
        (make_group(0, PolicyVersion(2, 0)), "invalid", "policy version 2.0 was never published"),
    ],
)
def test_refused_group_is_not_in_the_log(log, group, verdict, reason):
    queue = begin_queue(log)
    (receipt,) = queue.add([group])
    assert (receipt.verdict, receipt.position) == (verdict, None)
    assert reason in receipt.reason
    assert not log.payloads
    assert queue.status()["counts"]["generated"] == [0, 0]


def test_released_groups_are_assigned_first(log):
    queue = begin_queue(log, staleness=2)
    assert [queue.assign(name).group for name in "abab"] == [0, 1, 2, 3]
    assert queue.release("a") == [0, 2]
    assert [queue.assign("c").group for _ in range(3)] == [0, 2, 4]
    assert queue.release("unknown") == []


def test_late_answer_of_a_released_generator_is_used_and_the_second_one_dropped(log):
    queue = begin_queue(log)
    queue.assign("a")
    queue.release("a")
    assert queue.assign("b").group == 0
    assert verdicts(queue, make_group(0, FIRST, "a"), make_group(0, FIRST, "b")) == ["accepted", "duplicate"]
    assert queue.assign("a").group == 1


def test_refused_answer_returns_the_group_to_the_pool(log):
    queue = begin_queue(log)
    assert queue.assign("a").group == 0
    assert verdicts(queue, make_group(0, FIRST, "a", size=3)) == ["invalid"]
    assert queue.assign("b").group == 0


def test_groups_in_flight_survive_a_restart(log):
    queue = begin_queue(log, staleness=1)
    generate_all(queue)
    batch = complete_step(queue, 0)
    held = queue.assign("a")  # of version 1.1
    queue.begin(batch.cursor, timeline=2, step=1)
    assert queue.assign("b") is None  # before the first publication
    queue.publish(PolicyVersion(1, 1))
    assert verdicts(queue, make_group(held.group, held.version)) == ["accepted"]
    assert generate_all(queue) == [5]
    assert numbers(complete_step(queue, 1)) == [2, 3]
    assert queue.lineage.version(2) == PolicyVersion(2, 2)


def test_late_answer_of_a_lost_timeline_is_recorded_and_the_group_generated_again(log):
    queue = begin_queue(log)
    generate_all(queue)
    first = complete_step(queue, 0)
    generate_all(queue)
    complete_step(queue, 1)
    held = queue.assign("a")  # group 4 of version 1.2
    queue.begin(first.cursor, timeline=2, step=1)
    queue.publish(PolicyVersion(1, 1))
    assert verdicts(queue, make_group(held.group, held.version, "b")) == ["not_permitted"]
    assert verdicts(queue, make_group(held.group, held.version, "a")) == ["lost_timeline"]
    assert numbers(complete_step(queue, 1)) == [2, 3]
    assert queue.assign("a").version == PolicyVersion(2, 2)


def test_restart_before_the_first_checkpoint_keeps_what_the_initial_policy_generated(log):
    generate_all(begin_queue(log))
    queue = RolloutQueue(make_settings(), log, prompt_id)
    queue.begin(RolloutCursor.initial(1), timeline=2, step=0)
    assert numbers(queue.batch(0)) == [0, 1]


def test_attempt_number_must_be_new(log):
    queue = begin_queue(log)
    generate_all(queue)
    cursor = queue.batch(0).cursor
    for given, timeline in ((cursor, 1), (None, 1)):
        with pytest.raises(RolloutQueueError, match="a larger number for every attempt"):
            queue.begin(given, timeline, given.step if given else 0)
    with pytest.raises(RolloutQueueError, match="resumes at step 3 with the rollout cursor of step 1"):
        queue.begin(cursor, 2, 3)


def test_damaged_record_in_flight_is_counted_and_generated_again(log):
    queue = begin_queue(log, staleness=1)
    generate_all(queue)
    cursor = complete_step(queue, 0).cursor
    log.damage(dict(cursor.in_flight)[2])
    queue.begin(cursor, timeline=2, step=1)
    queue.publish(PolicyVersion(1, 1))
    assert queue.status()["damaged"][0]["position"] == dict(cursor.in_flight)[2].to_json()
    assert generate_all(queue)[0] == 2
    counts = complete_step(queue, 1).cursor.counts
    assert counts.dropped["damaged"] == Amount(2, 2)
    assert counts.conserved


def test_log_that_is_shorter_than_the_cursor_is_an_error(log):
    queue = begin_queue(log)
    generate_all(queue)
    cursor = complete_step(queue, 0).cursor
    log.payloads.pop()
    with pytest.raises(DataError):
        queue.begin(cursor, timeline=2, step=1)


def test_log_of_a_run_with_other_prompts_is_an_error(log):
    generate_all(begin_queue(log))
    queue = RolloutQueue(make_settings(), log, lambda group: group)
    with pytest.raises(DataError, match="segment 1, offset 0: group 0: expected prompt 0, found prompt 1000"):
        queue.begin(RolloutCursor.initial(1), timeline=2, step=0)


def test_failed_append_acknowledges_nothing_and_the_group_can_be_sent_again(log):
    queue = begin_queue(log)
    log.fail_next = True
    with pytest.raises(OSError, match="No space left"):
        queue.add([make_group(0, FIRST)])
    assert queue.status()["counts"]["generated"] == [0, 0]
    log.lose_next_answer = True
    with pytest.raises(TimeoutError):
        queue.add([make_group(0, FIRST)])
    assert verdicts(queue, make_group(0, FIRST), make_group(1, FIRST)) == ["duplicate", "accepted"]
    assert queue.batch(0).cursor.counts.generated == Amount(6, 6)


def test_fixed_policy_generates_a_group_with_the_version_that_first_permitted_it(log):
    queue = begin_queue(log, staleness=1, policy="fixed")
    queue.add([make_group(number, FIRST) for number in (0, 1)])
    cursor = complete_step(queue, 0).cursor
    assert cursor.versions == ((0, FIRST), (4, PolicyVersion(1, 1)))
    queue.begin(RolloutCursor.from_json(cursor.to_json()), timeline=2, step=1)
    queue.publish(PolicyVersion(1, 1))
    assert queue.policies_needed() == cursor.policies == {FIRST, PolicyVersion(1, 1)}
    assert verdicts(queue, make_group(2, PolicyVersion(1, 1))) == ["not_permitted"]
    assigned = [queue.assign("a") for _ in range(4)]
    assert [(entry.group, entry.version.step) for entry in assigned] == [(2, 0), (3, 0), (4, 1), (5, 1)]


def test_memory_holds_the_window_only(log):
    queue = begin_queue(log, staleness=2)
    for step in range(50):
        generate_all(queue)
        assert queue.status()["present"] <= 6
        complete_step(queue, step)
    assert len(queue._pool._waiting) <= 6
    assert len(queue._window.versions) <= 4
