"""Checks that need no run: the clarifying questions are answered, and the file defines what a gate asks for."""

from __future__ import annotations

from collections.abc import Callable

from meshwright_practice.checks import Check
from meshwright_practice.interview.evidence import RunEvidence
from meshwright_practice.interview.exercise import CLARIFICATIONS, STAGES


def clarified(evidence: RunEvidence) -> Check:
    """The four questions were answered, or the answers were given with --assume."""
    chosen = ", ".join(f"{option} = {answer}" for option, answer in evidence.options.items())
    questions = " ".join(each.question for each in CLARIFICATIONS)
    message = "" if evidence.answered else f"Ask before you code: {questions} --assume gives the answers."
    found = chosen if evidence.answered else f"assumed: {chosen}"
    return Check("clarified", evidence.answered, "an answer to each of the four questions", found, message)


def contract(gate: int) -> Callable[[RunEvidence], Check]:
    """The check that the functions of a gate and of those before it exist, with the contract's parameters."""
    needs = tuple(name for stage in STAGES if stage.gate <= gate for name in stage.needs)

    def check(evidence: RunEvidence) -> Check:
        missing = evidence.submission.missing(needs)
        found = "all of them" if not missing else f"{len(missing)} missing or different"
        return Check(f"contract_{gate}", not missing, f"the functions {', '.join(needs)}", found, "; ".join(missing))

    return check
