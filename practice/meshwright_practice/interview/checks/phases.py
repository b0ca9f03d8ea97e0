"""A step is divided into timed phases that lie within it and that show where time was spent."""

from __future__ import annotations

from math import isfinite
from typing import Any

from meshwright.base.io import format_percent
from meshwright_practice.checks import Check
from meshwright_practice.interview.checks.records import step_records
from meshwright_practice.interview.evidence import DELAY, SLOW_FETCH_AT, SLOW_LOSS_AT, RunEvidence

PHASE_NAMES = {
    "fetch": ("fetch", "data", "data_wait", "data_fetch", "loader", "loader_wait"),
    "copy": ("copy", "h2d", "transfer", "to_device", "host_to_device"),
    "forward": ("forward", "fwd"),
    "backward": ("backward", "bwd"),
    "sync": ("sync", "gradient_sync", "grad_sync", "communication", "comm", "all_reduce"),
    "update": ("update", "optimizer", "opt", "optimizer_step"),
    "save": ("save", "checkpoint", "ckpt"),
}
"""phase -> the names by which a record may call it"""
ROUNDING = 1e-3
"""share of a step by which rounded phases may exceed it"""
SEEN = 0.9
"""share of an injected delay that its phase must show; a sleep never ends early"""


def phase_seconds(record: dict[str, Any], phase: str) -> float | None:
    """The seconds of a phase in a record, or None."""
    phases = record.get("phases")
    if not isinstance(phases, dict):
        return None
    for name in PHASE_NAMES[phase]:
        value = phases.get(name)
        if isinstance(value, int | float) and isfinite(value) and value >= 0:
            return float(value)
    return None


def all_steps(evidence: RunEvidence) -> list[dict[str, Any]]:
    return [record for lines in evidence.records.values() for record in step_records(lines)]


def phases_timed(evidence: RunEvidence) -> Check:
    records = all_steps(evidence)
    expected = f"seconds of {', '.join(PHASE_NAMES)} in every record"
    missing = [name for name in PHASE_NAMES if any(phase_seconds(record, name) is None for record in records)]
    zero = [
        name for name in ("forward", "backward", "update") if not any(phase_seconds(record, name) for record in records)
    ]
    message = ""
    if missing:
        message = (
            f"Without {', '.join(missing)} a slow step has no cause; time each with perf_counter, 0 where it is empty."
        )
    elif zero:
        message = f"{', '.join(zero)} took 0 s in every step: measure around the call itself."
    found = "all phases" if not message else f"no time of {', '.join(missing or zero)}"
    return Check("phases_timed", not message, expected, found, message)


def phases_within_step(evidence: RunEvidence) -> Check:
    """Phases do not overlap: their sum is at most the time of the step."""
    shares = [
        sum(phase_seconds(record, name) or 0.0 for name in PHASE_NAMES) / record["seconds"]
        for record in all_steps(evidence)
        if record["seconds"] > 0
    ]
    worst = max(shares, default=2.0)
    passed = worst <= 1 + ROUNDING
    message = "" if passed else "Phases overlap, or the step's clock stops before its last phase."
    found = f"the phases are {format_percent(min(shares, default=0))} to {format_percent(worst)} of a step"
    return Check("phases_within_step", passed, "the sum of the phases is at most the time of the step", found, message)


def phases_attributed(evidence: RunEvidence) -> Check:
    """A slow fetch appears as fetch and a slow forward pass as forward."""
    problem, expected = "", f"delays of {DELAY * 1e3:.0f} ms in fetch and in loss appear in fetch and in forward"
    for rank, lines in sorted(evidence.records.items()):
        records = step_records(lines)
        for step, phase in ((SLOW_FETCH_AT, "fetch"), (SLOW_LOSS_AT, "forward")):
            seconds = phase_seconds(records[step], phase) or 0.0
            if seconds < SEEN * DELAY:
                problem = problem or f"rank {rank}, step {step + 1}: {phase} shows {seconds * 1e3:.1f} ms"
    message = "" if not problem else "Start and stop the clock of a phase directly around what it is named for."
    return Check("phases_attributed", not problem, expected, problem or "both appear", message)
