"""Which pairs of hosts exchange messages in which round, and for how long: a round-robin tournament. Torch-free.

In a round every host has at most one partner, so that disjoint pairs run together: `n` hosts meet each other in n - 1
rounds (n rounds if n is odd). A round has a shortest duration, so with many hosts only some rounds fit into the time:

    rounds   = min(n - 1, time / shortest round)        (n for an odd number of hosts)
    duration = min(longest round, time / rounds)

A tournament that is cut has evenly spaced rounds. Every host then still has `rounds` partners, which suffices to tell a
slow host, all of whose pairs are slow, from a slow link.
"""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST_ROUND = {"cpu": 0.05, "cuda": 0.25}
"""Seconds of the shortest round by device type; on CUDA a pair that meets for the first time connects first."""
LONGEST_ROUND = 1.0
"""Seconds after which a longer round does not improve the measurement."""

Round = tuple[tuple[int, int], ...]
"""Pairs of hosts, each by its number; the smaller number comes first"""


@dataclass(frozen=True)
class PairSchedule:
    """The rounds of a tournament."""

    rounds: tuple[Round, ...]
    round_seconds: float
    """time of one round; message sizes adapt to it"""
    all_rounds: int
    """rounds in which every host meets every other one"""

    @property
    def seconds(self) -> float:
        """The time of all rounds."""
        return len(self.rounds) * self.round_seconds

    @property
    def is_sampled(self) -> bool:
        return len(self.rounds) < self.all_rounds


def tournament(hosts: int) -> tuple[Round, ...]:
    """All rounds, by the circle method: one host stays, the others rotate around it. With an odd number of hosts, the
    partner of the one that stays rests.
    """
    if hosts < 2:
        return ()
    players = hosts + hosts % 2
    others = players - 1
    rounds = []
    for turn in range(others):
        pairs = [(turn, others)]
        pairs += [((turn + step) % others, (turn - step) % others) for step in range(1, players // 2)]
        rounds.append(tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < hosts)))
    return tuple(rounds)


def schedule_pairs(hosts: int, seconds: float, device_type: str) -> PairSchedule:
    """Returns the rounds that fit into so many seconds; at least one."""
    rounds = tournament(hosts)
    if not rounds:
        return PairSchedule((), 0.0, 0)
    count = max(1, min(len(rounds), int(seconds / SHORTEST_ROUND[device_type])))
    kept = tuple(rounds[index * len(rounds) // count] for index in range(count))
    return PairSchedule(kept, min(LONGEST_ROUND, max(SHORTEST_ROUND[device_type], seconds / count)), len(rounds))
