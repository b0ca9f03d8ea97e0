"""The timeline of an incident: injection, first symptom and detection, from the records of its run. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import format_seconds, printable
from meshwright.base.records.events import Event, read_events
from meshwright.errors import MeshwrightError
from meshwright_practice.incidents.incident import PracticeIncident
from meshwright_practice.incidents.job import JobState

EVENT_TEXTS = {
    "attempt_start": "attempt {attempt} starts its ranks",
    "restored": "attempt {attempt} continues from the checkpoint of step {step}",
    "damaged": "detection: the checkpoint {checkpoint} is damaged, and an older one is used",
    "nonfinite": "detection: a value of step {step} is not finite on rank {rank}",
    "hang": "detection: the supervisor says: {message}",
    "straggler": "detection: the supervisor says: {message}",
    "attempt_end": "attempt {attempt} ends",
}
"""Kind of an event -> what the timeline says. Of several equal texts the first counts."""
MAX_TEXT = 200
LONG_STEPS = ("straggler", "data")
"""Causes that make every step longer."""
LONG_STEP = 1.5
"""A step that takes this many times the median of those before the injection is a symptom."""


@dataclass(frozen=True)
class StoryMoment:
    """An entry of the timeline."""

    seconds: float
    """since the job started"""
    text: str


def build_timeline(incident: PracticeIncident, history: RunHistory | None, job: JobState) -> tuple[StoryMoment, ...]:
    """What happened, in the order of time. Without records, only that the job started."""
    moments = [StoryMoment(0.0, "the pager rings, and the job starts")]
    if history is not None:
        start = job.started or (history.attempts[0].started if history.attempts else None) or 0.0
        moments += [*event_moments(history, start), *step_moments(incident, history, start)]
    return tuple(sorted(moments, key=lambda moment: moment.seconds))


def event_moments(history: RunHistory, start: float) -> Iterator[StoryMoment]:
    folder = history.folder
    known: set[str] = set()
    paths = [folder.root / "events" / "supervisor.jsonl", *(folder.events(rank) for rank in history.ranks)]
    for path in paths:
        with suppress(MeshwrightError, OSError):
            for event in read_events(path):
                text = event_text(event)
                if text and text not in known:
                    known.add(text)
                    yield StoryMoment(float(event["time"]) - start, text)


def event_text(event: Event) -> str:
    """What the timeline says about an event; '' about most of them, and about one whose fields are missing."""
    with suppress(LookupError, ValueError, TypeError):
        template = EVENT_TEXTS.get(str(event["kind"]), "")
        return printable(template.format(**event))[:MAX_TEXT]
    return ""


def step_moments(incident: PracticeIncident, history: RunHistory, start: float) -> Iterator[StoryMoment]:
    """The step of the injection, and the first one that takes longer than those before it."""
    table, window = history.steps(), incident.step_window(history)
    if window is None or not len(table):
        return
    observed = incident.kind.observed_step is not None
    step = sum(window) // 2 if observed else int(incident.values["step"])
    at = np.flatnonzero(table.step == step)
    if len(at):
        yield StoryMoment(float(table.begin[at[0]]) - start, f"injection: step {step} begins")
    before = table.seconds[(table.step < step) & (table.step > 1)]
    if not len(before) or incident.kind.cause not in LONG_STEPS:
        return
    usual = float(np.median(before))
    long = np.flatnonzero((table.step >= step) & (table.seconds > LONG_STEP * usual))
    if len(long):
        index = long[0]
        took, number = format_seconds(float(table.seconds[index])), int(table.step[index])
        text = f"first symptom: step {number} takes {took}, and those before took {format_seconds(usual)}"
        yield StoryMoment(float(table.begin[index] + table.seconds[index]) - start, text)
