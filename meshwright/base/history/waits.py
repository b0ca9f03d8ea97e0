"""Divides the exposed communication of rank 0 into bubble, wait for a slow rank, and communication. Torch-free.

| part | seconds of a step |
|---|---|
| bubble | what the pipeline schedule predicts: its bubble's share of forward, backward and sync |
| straggler | of the rest, what the slowest rank took longer by itself than rank 0, if that rank is slow |
| exposed communication | the rest |

A rank is slow in a step if its local time (its phases without waits) are more than `launch.straggler_ratio` times the
median of the other ranks. If rank 0 itself is slow, its excess over the median counts as straggler, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import Column, StepTable
from meshwright.base.records.untrusted_records import bounded_object, finite_number

MAX_COMPARED_STEPS = 8192
"""Steps in which the ranks are compared; the steps between them have the shares of the nearest one."""
STRAGGLER_RATIO = 1.5
"""The ratio where run.toml has none."""


@dataclass(frozen=True)
class Waits:
    """Seconds of every step of rank 0 by the cause of the wait."""

    bubble: Column
    straggler: Column
    """the wait for a slow rank"""
    communication: Column
    own_excess: Column
    """the seconds that rank 0 itself takes longer than the others, as a slow rank"""


def divide_waits(history: RunHistory, table: StepTable) -> Waits:
    """The waits in the steps of a table of rank 0."""
    exposed = np.clip(np.nan_to_num(table.exposed), 0.0, table.seconds)
    phases = table.phases
    passes = np.nan_to_num(phases["forward"]) + np.nan_to_num(phases["backward"]) + np.nan_to_num(phases["sync"])
    bubble = np.minimum(exposed, bubble_shares(history, table) * passes)
    wait, own = compare_ranks(history, table)
    straggler = np.minimum(exposed - bubble, wait)
    return Waits(bubble, straggler, exposed - bubble - straggler, own)


def bubble_shares(history: RunHistory, table: StepTable) -> Column:
    """The share of the passes that the schedule of each attempt leaves idle; 0 without a pipeline."""
    shares = np.zeros(len(table))
    numbers = table.attempt
    for attempt in history.attempts:
        share = finite_number(bounded_object(attempt.start.get("pipeline")).get("bubble"))
        if share is not None and 0 < share < 1:
            shares[numbers == attempt.number] = share
    return shares


def compare_ranks(history: RunHistory, table: StepTable) -> tuple[Column, Column]:
    """(seconds that the slowest rank took longer than rank 0, seconds that rank 0 took longer than the others); both
    are 0 in steps without a slow rank.
    """
    wait, own = np.zeros(len(table)), np.zeros(len(table))
    keys = step_keys(table)
    others = [steps for rank in history.ranks if rank and len(steps := history.steps(rank))]
    if not others:
        return wait, own
    compared = np.flatnonzero(np.isin(keys, np.concatenate([step_keys(steps) for steps in others])))
    if not len(compared):
        return wait, own
    compared = compared[-MAX_COMPARED_STEPS:]
    seconds = np.full((len(others), len(compared)), np.nan)
    for row, steps in zip(seconds, others, strict=True):
        other_keys = step_keys(steps)
        order = np.argsort(other_keys, kind="stable")
        place = np.searchsorted(other_keys[order], keys[compared], side="right") - 1
        found = (place >= 0) & (other_keys[order][place] == keys[compared])
        row[found] = steps.local_seconds[order[place[found]]]
    first = table.local_seconds[compared]
    slowest = np.nanmax(seconds, axis=0)
    ratio = straggler_ratio(history)
    everyone = np.concatenate([seconds, first[None]])
    typical = np.nanmedian(everyone, axis=0) if len(others) > 1 else np.nanmin(everyone, axis=0)
    is_slow = slowest > ratio * typical
    found_wait = np.where(is_slow, np.maximum(0.0, slowest - first), 0.0)
    found_own = np.where(first > ratio * typical, first - typical, 0.0)
    nearest = nearest_index(compared, len(table))
    share = found_wait / np.maximum(first, 1e-9), found_own / np.maximum(first, 1e-9)
    scale = table.local_seconds
    return share[0][nearest] * scale, share[1][nearest] * scale


def step_keys(table: StepTable) -> NDArray[np.int64]:
    """One number per attempt and step."""
    return table.attempt % (1 << 22) * (1 << 40) + table.step % (1 << 40)


def nearest_index(places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """For each of `count` rows, the index of the nearest of the sorted places."""
    rows = np.arange(count)
    after = np.clip(np.searchsorted(places, rows), 0, len(places) - 1)
    before = np.maximum(0, after - 1)
    closer = np.abs(places[before] - rows) <= np.abs(places[after] - rows)
    return np.where(closer, before, after)


def straggler_ratio(history: RunHistory) -> float:
    ratio = finite_number(bounded_object(history.config.get("launch")).get("straggler_ratio"))
    return ratio if ratio is not None and ratio > 1 else STRAGGLER_RATIO
