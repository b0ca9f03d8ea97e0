"""Goodput from 8 to 16,384 ranks: detection and restart from the simulated protocol, failure rates that were published.

The times from the loss of a host until all ranks are started again are simulated (seed 0).
The start of a rank, the restore and the stall of a save are assumptions, stated in the result.
"""

from __future__ import annotations

import sys
import time
from functools import cache
from typing import Any

from meshwright.core.recover.checkpoint_interval import best_checkpoint_interval, goodput
from tests.simulated_hosts.recovery_times import LEADS, LOST, RecoveryTimes, measure_recovery
from tests.simulated_hosts.scenario import Scenario

RANKS_PER_HOST = 8
RANKS = (8, 64, 1024, 9600, 16384)
MAX_SIMULATED_HOSTS = 256
"""Larger jobs use the times of this many hosts, which hardly depend on it."""
RANK_START_SECONDS = 30.0
RESTORE_SECONDS = 60.0
STALLS = (0.5, 5.0)
HOUR = 3600.0
RATES = {
    "Meta RSC": (7.9 * HOUR, 1024),
    "Llama 3": (54 * 24 * HOUR / 419, 16384),
}
"""Mean time between failures in seconds, and the number of GPUs: arXiv 2410.21680 and 2407.21783."""
PUBLISHED = [
    {"run": "Llama 3 405B", "ranks": 16384, "goodput": "> 0.90", "source": "arXiv 2407.21783"},
    {"run": "ByteRobust", "ranks": 9600, "goodput": "0.97", "source": "arXiv 2509.16293"},
]


def measure() -> dict[str, Any]:
    scenario = Scenario(start_seconds=0.5, restore_seconds=0.0, poll_seconds=0.05, ranks_per_host=RANKS_PER_HOST)
    rows = {}
    for ranks in RANKS:
        started = time.process_time()
        rows[str(ranks)] = measure_size(ranks, scenario)
        print(f"scale, {ranks} ranks: {time.process_time() - started:.1f} s of CPU", file=sys.stderr)
    return {
        "assumptions": {
            "ranks_per_host": RANKS_PER_HOST,
            "host_timeout": scenario.host_timeout,
            "rank_start_seconds": RANK_START_SECONDS,
            "restore_seconds": RESTORE_SECONDS,
            "mtbf": "proportional to 1 / ranks",
            "rates": {name: {"mtbf_hours": round(mtbf / HOUR, 2), "ranks": n} for name, (mtbf, n) in RATES.items()},
        },
        "ranks": rows,
        "published": PUBLISHED,
    }


def measure_size(ranks: int, scenario: Scenario) -> dict[str, Any]:
    hosts = ranks // RANKS_PER_HOST
    times = simulate(min(hosts, MAX_SIMULATED_HOSTS), scenario)
    outage = times[LOST].started + RANK_START_SECONDS + RESTORE_SECONDS
    row: dict[str, Any] = {"hosts": hosts, "simulated_hosts": min(hosts, MAX_SIMULATED_HOSTS)}
    for lost, found in times.items():
        row[f"{lost}_lost"] = {
            "detected_seconds": round(found.detected, 1),
            "started_seconds": round(found.started, 1),
            "messages": found.messages,
        }
    row["outage_seconds"] = round(outage, 1)
    row["goodput"] = {
        f"{name}, stall {stall:g} s": goodput_at(mtbf * measured / ranks, stall, outage)
        for name, (mtbf, measured) in RATES.items()
        for stall in STALLS
    }
    return row


@cache
def simulate(hosts: int, scenario: Scenario) -> dict[str, RecoveryTimes]:
    return {lost: measure_recovery(hosts, lost, scenario) for lost in (LOST, LEADS)}


def goodput_at(mtbf: float, stall: float, outage: float) -> dict[str, float]:
    interval = best_checkpoint_interval(mtbf, stall)
    return {
        "mtbf_hours": round(mtbf / HOUR, 2),
        "interval_seconds": round(interval),
        "goodput": round(goodput(mtbf, stall, interval, outage), 4),
    }
