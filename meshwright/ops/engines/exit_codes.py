"""What an engine does when the supervisors of a job end, by their exit code: one table for all engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.base.records.failures import FINAL_EXIT_CODES

Action = Literal["done", "fail", "requeue", "retry"]
"""done: the run is complete. fail: another start ends in the same way. requeue: the run was stopped after a checkpoint,
and continues in another allocation, any number of times. retry: start again, a limited number of times in a row without
a new checkpoint."""


@dataclass(frozen=True)
class ExitCode:
    """One exit code of `meshwright train`, and what an engine does with it."""

    code: int
    meaning: str
    action: Action


MEANINGS = {
    0: "done, or already complete",
    1: "unexpected error",
    2: "invalid config",
    3: "identity mismatch",
    4: "no intact checkpoint",
    5: "restarts exhausted",
    6: "data error",
    7: "non-finite loss or gradient",
    8: "peer lost or hung",
    9: "run folder in use by another job",
    130: "stopped by SIGINT, after a checkpoint",
    143: "stopped by SIGTERM, after a checkpoint",
}


def action_of(code: int) -> Action:
    """What an engine does with an exit code. A code that Meshwright does not give, such as 137, is retried."""
    if code == 0:
        return "done"
    if code == 143:  # SIGTERM is what engines send for a time limit, a preemption or a node that is drained
        return "requeue"
    return "fail" if code in (*FINAL_EXIT_CODES, 130) else "retry"


EXIT_CODES = tuple(ExitCode(code, meaning, action_of(code)) for code, meaning in MEANINGS.items())
FAIL_CODES = tuple(entry.code for entry in EXIT_CODES if entry.action == "fail")
