"""The records of the steps of a run that survive, and the settings that they were made with. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshwright.replay.step_detail import COMPARED
from meshwright.telemetry.events import Event, read_events
from meshwright.telemetry.run_folder import RunFolder

ABSENT = {"loss_scale": None, "skipped": False}
"""The values of fields that a step record has only if they say something."""


@dataclass(frozen=True)
class RunRecords:
    """The steps of a run as rank 0 recorded them; of a step that several attempts completed, the last one counts."""

    steps: dict[int, Event] = field(default_factory=dict)
    """step -> the fields of COMPARED, and `attempt`"""
    starts: dict[int, Event] = field(default_factory=dict)
    """attempt -> its start record"""

    def start_of(self, step: int) -> Event:
        """The start record of the attempt that recorded a step; that of the newest attempt if none did."""
        attempt = self.steps[step]["attempt"] if step in self.steps else max(self.starts, default=0)
        return self.starts.get(attempt, {})


def read_step_records(folder: RunFolder) -> RunRecords:
    """Reads the event file of rank 0, which is untrusted."""
    records = RunRecords()
    for event in read_events(folder.events(0)):
        kind, step, attempt = event.get("kind"), event.get("step"), event.get("attempt")
        if type(attempt) is not int:
            continue
        if kind == "start":
            records.starts[attempt] = event
        elif kind == "step" and type(step) is int:
            records.steps[step] = compared_fields(event) | {"attempt": attempt}
    return records


def compared_fields(event: Event) -> dict[str, Any]:
    return {key: event.get(key, ABSENT.get(key)) for key in COMPARED}


def compare_fields(one: Event, other: Event) -> dict[str, tuple[Any, Any]]:
    """The fields in which two records of a step differ, with both values. Numbers are compared bit for bit; NaN and
    infinity are recorded as null.
    """
    return {key: (one[key], other[key]) for key in COMPARED if one[key] != other[key]}
