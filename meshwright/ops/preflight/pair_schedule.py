"""Which pairs of hosts exchange messages in which round, and for how long: a round-robin tournament. Torch-free.

In a round every host has at most one partner, so that disjoint pairs run together: `n` hosts meet each other in n - 1
rounds (n rounds if n is odd). A round has a shortest duration, so with many hosts only some rounds fit into the time:

    rounds   = min(n - 1, time / shortest round)        (n for an odd number of hosts)
    duration = min(longest round, time / rounds)

A tournament that is cut has evenly spaced rounds. Every host then still has `rounds` partners, which suffices to tell a
slow host, all of whose pairs are slow, from a slow link. Pairs that are slow are measured again, since the network may
have been busy; the better measurement counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST_ROUND = {"cpu": 0.05, "cuda": 0.25}
"""Seconds of the shortest round by device type; on CUDA a pair that meets for the first time connects first."""
LONGEST_ROUND = 1.0
"""Seconds after which a longer round does not improve the measurement."""

MAX_REPEATED_ROUNDS = 4
"""Rounds in which slow pairs are measured again."""

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


def tournament_rounds(hosts: int) -> int:
    """The number of rounds in which every host meets every other one."""
    return 0 if hosts < 2 else hosts - 1 + hosts % 2


def tournament_round(hosts: int, turn: int) -> Round:
    """One round, by the circle method: one host stays, the others rotate around it. With an odd number of hosts, the
    partner of the one that stays rests.
    """
    others = tournament_rounds(hosts)
    pairs = [(turn, others)]
    pairs += [((turn + step) % others, (turn - step) % others) for step in range(1, (others + 1) // 2)]
    return tuple(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < hosts))


def schedule_pairs(hosts: int, seconds: float, device_type: str) -> PairSchedule:
    """Returns the rounds that fit into so many seconds; at least one."""
    total = tournament_rounds(hosts)
    if not total:
        return PairSchedule((), 0.0, 0)
    count = max(1, min(total, int(seconds / SHORTEST_ROUND[device_type])))
    rounds = tuple(tournament_round(hosts, index * total // count) for index in range(count))
    return PairSchedule(rounds, min(LONGEST_ROUND, max(SHORTEST_ROUND[device_type], seconds / count)), total)


def schedule_again(pairs: Sequence[tuple[int, int]], round_seconds: float) -> PairSchedule:
    """Returns rounds of disjoint pairs for pairs that are measured again; what does not fit into them is left out."""
    rounds: list[list[tuple[int, int]]] = []
    for pair in pairs:
        for members in rounds:
            if not any(set(pair) & set(other) for other in members):
                members.append(pair)
                break
        else:
            if len(rounds) < MAX_REPEATED_ROUNDS:
                rounds.append([pair])
    return PairSchedule(tuple(map(tuple, rounds)), round_seconds, len(rounds))
