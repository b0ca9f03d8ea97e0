"""Where the wall time of a run went, as a section of its report. Torch-free."""

from __future__ import annotations

from meshwright.base.history.goodput import PARTS, goodput
from meshwright.base.history.run_history import RunHistory
from meshwright.base.io import format_count, format_percent, format_seconds
from meshwright.insight.report.document import Section, Table
from meshwright.insight.report.pictures import make_bars

PART_CLASSES = {
    "productive": "green",
    "data": "gold",
    "exposed communication": "orange",
    "bubble": "violet",
    "straggler": "red",
    "checkpoint": "teal",
    "evaluation": "sky",
    "callback": "lime",
    "bookkeeping": "brown",
    "start": "slate",
    "compile": "blue",
    "skipped": "warn",
    "lost work": "bad",
    "stalled": "ink",
    "restart": "pink",
    "idle": "grey",
    "end": "sand",
}
"""The color of every part of the goodput account, as on the live page."""


def account_section(history: RunHistory, now: float) -> Section:
    """Where the wall time of the run went, through all attempts."""
    account = goodput(history, now)
    if account.wall_seconds <= 0:
        return Section("Goodput account", ["No time is on record."])
    parts = {part: spent for part, spent in account.parts.items() if spent > 0}
    rows = {"run": parts}
    if len(account.attempts) > 1:
        rows |= {f"attempt {each.number}": each.parts for each in account.attempts[-8:]}
    shares = {part: format_percent(spent / account.wall_seconds, 1) for part, spent in parts.items()}
    chart = make_bars(
        "", rows, PART_CLASSES, format_seconds, {part: f"{part} {share}" for part, share in shares.items()}
    )
    productive = shares.get("productive", "0%")
    sentence = (
        f"{productive} of {format_seconds(account.wall_seconds)} of wall time were productive: "
        f"{format_count(account.samples_per_second)} unique samples per second."
    )
    rows_of_parts = [[part, format_seconds(spent), shares[part], PARTS[part]] for part, spent in parts.items()]
    table = Table(("part", "time", "share", "meaning"), rows_of_parts, (0, 3))
    return Section("Goodput account", [sentence], tables=[table], bars=[chart], notes=account.notes)
