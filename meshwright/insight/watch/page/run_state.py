"""The state of a run at one moment, as the page shows it: signals, goodput, attempts and memory. Torch-free."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from meshwright.base.history.attempts import AttemptHistory
from meshwright.base.history.goodput import goodput
from meshwright.base.history.run_history import RunHistory
from meshwright.base.history.signals import read_signals
from meshwright.base.records.events import Event
from meshwright.insight.watch.page.rollouts import describe_rollouts

MAX_ROWS = 60
"""Attempts, checkpoints and notices that are listed: the newest."""
MAX_MEMORY_ROWS = 64
"""Ranks whose memory is shown: those with the largest peaks."""
MAX_INCIDENTS = 8
"""Attempts whose incident is described in full: the newest."""
MAX_STACK = 4000
"""Characters of a stack trace that are shown: the last ones."""
NOTICES = ("stragglers", "hangs", "save_failures", "bad_samples", "nonfinite", "callback_failures", "lost_events")
"""The lists of a history whose events are shown as notices."""


def describe_run(history: RunHistory, now: float) -> dict[str, Any]:
    """Everything that the page shows besides curves, heat map, timeline and logs."""
    started = next((attempt for attempt in reversed(history.attempts) if attempt.start), None)
    start = started.start if started else {}
    attempts = history.attempts[-MAX_ROWS:]
    account = goodput(history, now)
    return {
        "time": now,
        "signals": read_signals(history, now, account).to_json(),
        "goodput": {"wall_seconds": account.wall_seconds, "parts": account.parts, "notes": account.notes[:8]},
        "unit": str(start.get("unit", "tokens"))[:16],
        "size": started.ranks if started else 0,
        "layout": str(start.get("layout", ""))[:200],
        "ranks": history.ranks[:4096],
        "attempts": [describe_attempt(one, attempts[-MAX_INCIDENTS:]) for one in attempts],
        "attempt_count": len(history.attempts),
        "checkpoints": [asdict(found) for found in history.checkpoints[-MAX_ROWS:]],
        "checkpoint_count": len(history.checkpoints),
        "notices": describe_notices(history),
        "memory": describe_memory(history),
        "rollouts": describe_rollouts(history),
    }


def describe_attempt(attempt: AttemptHistory, in_full: list[AttemptHistory]) -> dict[str, Any]:
    """When an attempt began and ended, its steps, and its incident; with stack and output if it is among `in_full`."""
    incident = attempt.incident
    described = None
    if incident is not None:
        names = ("outcome", "rank", "step", "phase", "error_type", "message", "verdict", "recommendation")
        described = {name: getattr(incident, name) for name in names}
        if attempt in in_full:
            described |= {"stack": incident.stack[-MAX_STACK:], "log_tail": incident.log_tail}
    return {
        "number": attempt.number,
        "started": attempt.started,
        "ended": attempt.ended,
        "restart": attempt.restart,
        "first_step": attempt.first_step,
        "done": attempt.done,
        "outcome": attempt.outcome,
        "incident": described,
    }


def describe_notices(history: RunHistory) -> list[dict[str, Any]]:
    """The newest events that are no incidents but deserve attention, newest first; those of the same kind and rank in
    an attempt are one notice, with their number.
    """
    events = [event for name in NOTICES for event in getattr(history, name)]
    events.sort(key=lambda event: event["time"] or 0.0)
    newest = {(event["kind"], event["attempt"], event["rank"]): event for event in events}
    counts = Counter((event["kind"], event["attempt"], event["rank"]) for event in events)
    shown = sorted(newest.items(), key=lambda item: item[1]["time"] or 0.0, reverse=True)
    return [
        {
            "kind": event["kind"].replace("_", " "),
            "time": event["time"],
            "attempt": event["attempt"],
            "rank": event["rank"],
            "step": event.get("step"),
            "count": counts[key],
            "message": describe_event(event),
        }
        for key, event in shown[:MAX_ROWS]
    ]


def describe_event(event: Event) -> str:
    """One sentence about an event of NOTICES."""
    match event["kind"]:
        case "bad_sample":
            return f"Sample {event['sample']} (index {event['index']} of {event['source']}): {event['reason']}"
        case "nonfinite":
            where = f"first in module {event['module']}" if event["module"] else "in no module of this rank"
            return f"A loss or gradient is not finite, {where}."
        case "callback_failed":
            return f"{event['callback']}.{event['hook']}: {event['message']}"
        case _:
            return str(event["message"])


def describe_memory(history: RunHistory) -> list[dict[str, Any]]:
    """The memory classes of every rank at the moment of its largest sum, from the newest counters."""
    rows: list[dict[str, Any]] = [
        {"rank": rank, "step": counters.step, "total": counters.peak_total, "classes": counters.at_peak}
        for rank, counters in sorted(history.counters.items())
    ]
    if len(rows) > MAX_MEMORY_ROWS:
        rows.sort(key=lambda row: row["total"], reverse=True)
    return rows[:MAX_MEMORY_ROWS]
