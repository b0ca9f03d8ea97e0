"""The records of the steps of a run that survive, as the values that a replay compares. Torch-free."""

from __future__ import annotations

from math import isnan
from typing import Any

from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.step_table import StepTable
from meshwright.base.records.events import Event
from meshwright.base.records.untrusted_records import finite_number
from meshwright.prover.replay.step_detail import COMPARED


class RunRecords:
    """The steps of a run as rank 0 recorded them; of a step that several attempts completed, the last one counts."""

    def __init__(self, history: RunHistory) -> None:
        table = history.steps(0).survived()
        self.steps = dict(zip(table.step.tolist(), recorded_fields(table), strict=True))
        """step -> the fields of COMPARED"""
        self._attempts = dict(zip(table.step.tolist(), table.attempt.tolist(), strict=True))
        self._starts = {attempt.number: attempt.start for attempt in history.attempts}

    def start_of(self, step: int) -> Event:
        """The start record of the attempt that recorded a step; that of the newest attempt if none did."""
        return self._starts.get(self._attempts.get(step, max(self._starts, default=0)), {})


def recorded_fields(table: StepTable) -> list[dict[str, Any]]:
    """The compared fields of every row; NaN is a value that was not recorded, or was not finite."""
    columns = {
        key: [None if isnan(value) else value for value in table.column(key).tolist()]
        for key in COMPARED
        if key != "skipped"
    }
    columns["skipped"] = table.skipped.tolist()
    return [
        dict(zip(COMPARED, values, strict=True)) for values in zip(*(columns[key] for key in COMPARED), strict=True)
    ]


def event_fields(event: Event) -> dict[str, Any]:
    """The compared fields of the record of a step, as the history of a run has them."""
    return {key: finite_number(event.get(key)) for key in COMPARED} | {"skipped": event.get("skipped") is True}


def compare_fields(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The fields in which two records of a step differ, with both values. Numbers are compared bit for bit."""
    return {key: (one[key], other[key]) for key in COMPARED if one[key] != other[key]}
