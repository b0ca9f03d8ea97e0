"""Divides the steps of rank 0 into the parts of the goodput account; tells which steps are kept. Torch-free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.base.history.account import PARTS
from meshwright.base.history.attempts import FAILURES
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import Column, StepTable
from meshwright.base.history.waits import divide_waits

PART = {part: index for index, part in enumerate(PARTS)}


def divide_steps(history: RunHistory, table: StepTable) -> NDArray[np.float64]:
    """The seconds of every step (rows) by part (columns)."""
    seconds = np.zeros((len(table), len(PARTS)))
    if not len(table):
        return seconds
    local, waits = table.local, divide_waits(history, table)
    compute = local["forward"] + local["backward"] + local["update"]
    own_excess = np.minimum(compute, waits.own_excess)
    observed = np.minimum(compute - own_excess, observation_excess(table, compute))
    seconds[:, PART["productive"]] = compute - own_excess - observed
    seconds[:, PART["data"]] = local["fetch"] + local["copy"]
    seconds[:, PART["exposed communication"]] = waits.communication
    seconds[:, PART["bubble"]] = waits.bubble
    seconds[:, PART["straggler"]] = waits.straggler + own_excess
    seconds[:, PART["bookkeeping"]] = observed
    return seconds


def observation_excess(table: StepTable, compute: Column) -> Column:
    """The seconds by which counters or the profiler make a step longer than the typical step of its attempt."""
    excess = np.zeros(len(table))
    observed, numbers = table.counted | table.profiled, table.attempt
    for number in np.unique(numbers[observed]):
        typical = compute[(numbers == number) & ~observed]
        if len(typical):
            rows = (numbers == number) & observed
            excess[rows] = np.maximum(0.0, compute[rows] - np.median(typical))
    return excess


def survives(history: RunHistory, table: StepTable) -> NDArray[np.bool_]:
    """Whether the state that the run continued from, or ended with, contains each step.

    A later attempt that began at step k has dropped the steps from k on of all earlier ones. If the last attempt has
    failed, what the newest checkpoint does not contain is lost.
    """
    limit = np.iinfo(np.int64).max
    newest = history.newest_attempt
    if newest is not None and newest.outcome in FAILURES and newest.steps_recorded is not None:
        limit = max((found.step for found in history.checkpoints if found.state == "published"), default=0)
    kept = np.zeros(len(table), bool)
    steps, numbers = table.step, table.attempt
    for attempt in reversed(history.attempts):
        rows = numbers == attempt.number
        kept[rows] = steps[rows] < limit
        if attempt.restored is not None or attempt.steps_recorded is not None:
            limit = min(limit, attempt.first_step)
    return kept
