"""The audit of rollouts on made-up histories: each broken rule is found, and nothing else."""

from __future__ import annotations

import pytest

from meshwright.prover.policy.audit import LoggedGroup, check_counts, find_unlogged, read_history


def event(attempt, step, groups, version=None, dropped=(), log=40):
    """A step of an attempt that trains these groups; the policy is that of the step, of this attempt."""
    version = version or [attempt, step]
    return {
        "attempt": attempt,
        "step": step,
        "groups": [[group, version, 100 + group] for group in groups],
        "dropped": [[group, version, cause] for group, cause in dropped],
        "log": [1, log],
    }


def problems(events, bound=0):
    history = read_history(events, bound)
    return history.twice, history.late, history.lost


def test_a_lost_step_may_train_its_groups_again():
    events = [event(1, 0, [0, 1]), event(1, 1, [2, 3]), event(2, 1, [2, 3], version=[1, 1]), event(2, 2, [4, 5])]
    assert problems(events) == ([], [], [])


def test_a_group_that_the_history_has_trained_is_found():
    twice, _, _ = problems([event(1, 0, [0, 1]), event(1, 1, [2, 3]), event(2, 2, [3, 4])], bound=2)
    assert twice == ["attempt 2, step 2: group 3 was consumed by step 1"]


def test_a_group_that_was_left_out_may_not_be_trained():
    twice, _, _ = problems([event(1, 0, [0, 2], dropped=[(1, "no_signal")]), event(1, 1, [1, 3])], bound=1)
    assert twice == ["attempt 1, step 1: group 1 was consumed by step 0"]


def test_a_group_that_is_skipped_is_found():
    twice, _, _ = problems([event(1, 0, [0, 1]), event(1, 1, [3, 4])])
    assert twice == ["attempt 1, step 1: expected the groups from 2 to 3, found [3, 4]"]


def test_a_policy_beyond_the_bound_is_found():
    events = [event(1, 0, [0]), event(1, 1, [1], version=[1, 0]), event(1, 2, [2], version=[1, 0])]
    assert problems(events, bound=2) == ([], [], [])
    assert problems(events, bound=1)[1] == ["attempt 1, step 2: group 2 of policy 1.0, and rl.staleness = 1"]


def test_a_policy_that_a_restart_lost_is_found():
    events = [event(1, 0, [0]), event(1, 1, [1]), event(2, 1, [1], version=[1, 1]), event(2, 2, [2], version=[1, 2])]
    assert problems(events)[2] == ["attempt 2, step 2: group 2 has policy 1.2, and the weights descend from 2.2"]


def record(offset, group, version, rollouts=4, tokens=10):
    return LoggedGroup((1, offset), group, version, 100 + group, rollouts, tokens, "")


def cursor(**counts):
    dropped = {key: [0, 0] for key in ("duplicate", "stale", "lost_timeline", "no_signal", "failed", "damaged")}
    return {
        "step": 1,
        "frontier": 2,
        "position": [1, 40],
        "in_flight": [[2, 1, 20]],
        "counts": {
            "generated": [16, 40],
            "trained": [8, 20],
            "in_flight": [4, 10],
            "dropped": dropped | {"duplicate": [4, 10]},
        }
        | counts,
    }


LOG = [record(0, 0, (1, 0)), record(10, 1, (1, 0)), record(20, 2, (1, 0)), record(30, 1, (1, 0)), record(40, 3, (1, 1))]


def test_counts_of_a_checkpoint_are_those_of_the_log_before_it():
    history = read_history([event(1, 0, [0, 1])], 0)
    assert check_counts(history, LOG, 1, cursor()) == []
    assert find_unlogged(history, LOG) == []
    assert find_unlogged(history, LOG[1:]) == ["step 0: group 0 of policy 1.0 is not in the log"]


def test_a_rollout_that_no_count_has_is_found():
    history = read_history([event(1, 0, [0, 1])], 0)
    found = check_counts(history, LOG, 1, cursor(trained=[4, 10]))
    assert found[0].endswith("trained is [4, 10], and the log has [8, 20] rollouts and tokens")
    assert found[1].endswith("[16, 40] are generated, and [12, 30] are accounted for")
    moved = cursor() | {"frontier": 1}
    assert check_counts(history, LOG, 1, moved)[0].endswith("the frontier is 1, and the steps consumed 2 groups")


# Attempt 1 trains group 0 and is lost after step 1; attempt 2 repeats step 1, and trains group 2 too.
RESTARTED = [
    event(1, 0, [0], log=20),
    event(1, 1, [1], log=40),
    event(2, 1, [1], version=[1, 1], log=70),
    event(2, 2, [2], log=100),
]
RESTARTED_LOG = [
    record(0, 0, (1, 0)),
    record(10, 1, (1, 0)),  # it waits, and step 1 comes too late for it: stale
    record(20, 2, (1, 0)),  # stale when it arrives
    record(30, 1, (1, 1)),
    record(40, 2, (1, 2)),  # of the lost step 1
    record(50, 1, (1, 1)),  # duplicate
    record(70, 2, (2, 2)),
    record(80, 2, (2, 2)),  # duplicate
    record(90, 3, (2, 2)),  # too old for the next step
]


def restarted_cursor(**dropped):
    none = {key: [0, 0] for key in ("duplicate", "stale", "lost_timeline", "no_signal", "failed", "damaged")}
    causes = {"duplicate": [8, 20], "stale": [12, 30], "lost_timeline": [4, 10]}
    counts = {"generated": [36, 90], "trained": [12, 30], "in_flight": [0, 0], "dropped": none | causes | dropped}
    return {"step": 3, "frontier": 3, "position": [1, 100], "in_flight": [], "counts": counts}


def test_dropped_rollouts_are_counted_under_their_own_cause():
    history = read_history(RESTARTED, 0)
    assert (history.twice, history.late, history.lost) == ([], [], [])
    assert check_counts(history, RESTARTED_LOG, 2, restarted_cursor()) == []


@pytest.mark.parametrize(
    "dropped",
    [
        {"stale": [16, 40], "lost_timeline": [0, 0]},
        {"duplicate": [12, 30], "lost_timeline": [0, 0]},
        {"duplicate": [4, 10], "stale": [16, 40]},
        {"duplicate": [4, 10], "damaged": [4, 10]},
    ],
)
def test_a_queue_that_counts_rollouts_under_another_cause_is_found(dropped):
    found = check_counts(read_history(RESTARTED, 0), RESTARTED_LOG, 2, restarted_cursor(**dropped))
    assert len(found) == 2
    for name, amount in dropped.items():
        assert any(f"attempt 2: {name} is {amount}, and the log has" in problem for problem in found)


def test_rollouts_of_initial_weights_that_no_checkpoint_has_are_of_a_lost_timeline():
    history = read_history([event(1, 0, [0], log=20), event(2, 0, [0], log=40)], 0)
    log = [record(0, 0, (1, 0)), record(20, 0, (2, 0))]
    lost = cursor() | {"step": 1, "frontier": 1, "in_flight": []}
    dropped = lost["counts"]["dropped"] | {"duplicate": [0, 0], "lost_timeline": [4, 10]}
    lost["counts"] = {"generated": [8, 20], "trained": [4, 10], "in_flight": [0, 0], "dropped": dropped}
    assert check_counts(history, log, 2, lost) == []
