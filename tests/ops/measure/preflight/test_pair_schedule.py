"""The tournament of host pairs: every pair once, disjoint pairs per round, a bounded time for any number of hosts."""

from __future__ import annotations

from itertools import combinations

import pytest

from meshwright.ops.preflight.pair_schedule import (
    LONGEST_ROUND,
    MAX_REPEATED_ROUNDS,
    SHORTEST_ROUND,
    schedule_again,
    schedule_pairs,
    tournament_round,
    tournament_rounds,
)
from meshwright.ops.preflight.rank import TIME_SHARES


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 5, 8, 9, 33])
def test_tournament_has_every_pair_once_in_rounds_of_disjoint_pairs(hosts):
    rounds = [tournament_round(hosts, turn) for turn in range(tournament_rounds(hosts))]
    assert len(rounds) == (0 if hosts < 2 else hosts - 1 if hosts % 2 == 0 else hosts)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(hosts), 2))
    for pairs in rounds:
        members = [host for pair in pairs for host in pair]
        assert len(members) == len(set(members))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("hosts", [2, 3, 16, 64, 511, 512, 2048])
@pytest.mark.parametrize("budget", [1.0, 10.0, 30.0])
def test_rounds_of_any_number_of_hosts_fit_into_the_time(hosts, device, budget):
    seconds = TIME_SHARES["pairs"] * budget
    schedule = schedule_pairs(hosts, seconds, device)
    assert schedule.rounds
    assert SHORTEST_ROUND[device] <= schedule.round_seconds <= LONGEST_ROUND
    assert schedule.seconds <= seconds + 1e-9
    assert schedule.is_sampled == (len(schedule.rounds) < (hosts - 1 if hosts % 2 == 0 else hosts))


def test_512_hosts_have_fourteen_partners_each_within_the_default_time_on_cuda():
    schedule = schedule_pairs(512, TIME_SHARES["pairs"] * 10, "cuda")
    assert (len(schedule.rounds), schedule.all_rounds) == (14, 511)
    assert schedule.seconds <= 3.5
    partners = {host: set() for host in range(512)}
    for pairs in schedule.rounds:
        for first, second in pairs:
            partners[first].add(second)
            partners[second].add(first)
    assert {len(others) for others in partners.values()} == {14}


def test_slow_pairs_are_measured_again_in_few_rounds_of_disjoint_pairs():
    schedule = schedule_again([(0, 1), (2, 3), (0, 2), (1, 3), (0, 3)], 0.5)
    assert schedule.rounds == (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3),))
    assert len(schedule_again([(0, other) for other in range(1, 100)], 0.5).rounds) == MAX_REPEATED_ROUNDS
    assert schedule_again([], 0.5).rounds == ()
