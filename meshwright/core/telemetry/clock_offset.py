"""Measures the offsets of the ranks' clocks against the clock of rank 0, by messages that go there and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

ROUNDS = 8
"""Messages that rank 0 exchanges with every rank of another host; the fastest one counts."""


@dataclass(frozen=True)
class ClockOffset:
    """The clock of a rank minus that of rank 0, in seconds. The true offset is within `error` of it."""

    seconds: float = 0.0
    error: float = 0.0


def boot_number() -> int:
    """A number of this boot of the kernel, whose processes share one clock; 0 where it is unknown."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        return int(text, 16) >> 65
    except (OSError, ValueError):
        return 0


def measure_clock_offset(
    rank: int, ranks: int, boot: int | None = None, now: Callable[[], int] = time.time_ns
) -> ClockOffset:
    """Returns the offset of this rank; every rank calls it. Ranks under the kernel of rank 0 have the same clock.

    Rank 0 asks every other rank for its time. The answer was given between question and answer, so half of the round
    trip bounds the error; the round with the shortest one counts.
    """
    if ranks == 1:
        return ClockOffset()
    boots = torch.zeros(ranks, dtype=torch.int64)
    boots[rank] = boot_number() if boot is None else boot
    dist.all_reduce(boots)
    others = [other for other in range(1, ranks) if not boots[other] or boots[other] != boots[0]]
    offsets = torch.zeros(ranks, 2, dtype=torch.int64)
    for other in others:
        if rank == 0:
            offsets[other] = torch.tensor(ask_for_time(other, now))
        elif rank == other:
            answer_with_time(now)
    dist.all_reduce(offsets)
    seconds, error = (offsets[rank].double() / 1e9).tolist()
    return ClockOffset(seconds, error)


def ask_for_time(other: int, now: Callable[[], int]) -> tuple[int, int]:
    """Returns (offset, half of the round trip) of the fastest round, in nanoseconds."""
    rounds: list[tuple[int, int]] = []
    for _ in range(ROUNDS):
        message = torch.zeros(1, dtype=torch.int64)
        asked = now()
        dist.send(message, other)
        dist.recv(message, other)
        answered = now()
        rounds.append(((answered - asked + 1) // 2, int(message) - (asked + answered) // 2))
    error, offset = min(rounds)
    return offset, error


def answer_with_time(now: Callable[[], int]) -> None:
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(ROUNDS):
        dist.recv(message, 0)
        dist.send(message.fill_(now()), 0)
