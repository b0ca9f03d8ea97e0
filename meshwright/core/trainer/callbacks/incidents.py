"""Which incidents of earlier attempts the callbacks have not received yet. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from meshwright.base.io import read_json
from meshwright.base.records.events import Event
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.trainer.callbacks.callback import Callback, RunContext
from meshwright.core.trainer.callbacks.hooks import CallHook
from meshwright.errors import MeshwrightError

FAILURES = ("failed", "hang", "lost")
"""Outcomes of an attempt that callbacks receive as incidents."""


def unreported_incidents(folder: RunFolder, attempt: int) -> Iterator[tuple[int, Event]]:
    """(attempt, record) of every failed attempt before `attempt` whose incident no callback has received."""
    for earlier in folder.attempts():
        if earlier < attempt and not marker(folder, earlier).exists():
            with suppress(MeshwrightError, OSError):
                incident = read_json(folder.incident(earlier))
                if isinstance(incident, dict) and incident.get("outcome") in FAILURES:
                    yield earlier, {"kind": "incident", **incident}


def mark_reported(folder: RunFolder, attempt: int) -> None:
    """Records that the callbacks have received the incident of an attempt."""
    with suppress(OSError):
        marker(folder, attempt).touch()


def marker(folder: RunFolder, attempt: int) -> Path:
    return folder.attempt(attempt) / "incident.reported"


def report_last_incident(callbacks: Sequence[Callback], run: RunContext, report: Callable[..., None]) -> None:
    """Passes the incidents of a job that gives up to the callbacks, in the process of the supervisor."""
    call_hook = CallHook(report)
    for attempt, incident in unreported_incidents(run.folder, run.attempt + 1):
        for callback in callbacks:
            call_hook(callback, dict(incident), run)
        mark_reported(run.folder, attempt)
