"""The result of one check of a user's work: what labs and interviews report, on the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = 1


@dataclass(frozen=True)
class Check:
    """One check. `expected` and `found` are texts with units; `message` says what to look at next if it failed."""

    name: str
    passed: bool
    expected: str = ""
    found: str = ""
    message: str = ""


def results(subject: str, checks: Sequence[Check], message: str = "") -> dict[str, Any]:
    """The JSON form of a graded work: `status` is pass, fail, or error where nothing could be checked."""
    status = "error" if not checks else "pass" if all(check.passed for check in checks) else "fail"
    return {
        "format": FORMAT,
        "subject": subject,
        "status": status,
        "message": message,
        "checks": [asdict(check) for check in checks],
    }
