"""Clock offsets are measured against rank 0, and are zero under one kernel."""

from __future__ import annotations

import time

from meshwright.core.parallel.world import World
from meshwright.core.telemetry.clock_offset import ClockOffset, measure_clock_offset
from meshwright.testing import run_ranks

AHEAD = 3600.0


def measure(world: World) -> list[tuple[float, float]]:
    same = measure_clock_offset(world.rank, world.size)
    ahead = round(AHEAD * 1e9) if world.rank == 1 else 0
    other_host = measure_clock_offset(world.rank, world.size, boot=world.rank + 1, now=lambda: time.time_ns() + ahead)
    return [(offset.seconds, offset.error) for offset in (same, other_host)]


def test_clock_offsets_are_zero_under_one_kernel_and_within_the_round_trip_elsewhere() -> None:
    first, second = run_ranks(measure, 2)
    assert first == [(0.0, 0.0), (0.0, 0.0)]
    assert second[0] == (0.0, 0.0)
    seconds, error = second[1]
    assert abs(seconds - AHEAD) <= error  # both ranks read the same clock, so this holds whatever the load
    assert error > 0


def test_clock_offset_of_one_rank_needs_no_process_group() -> None:
    assert measure_clock_offset(0, 1) == ClockOffset()
