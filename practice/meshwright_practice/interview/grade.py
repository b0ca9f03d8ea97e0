"""Decides the checks of the gates on one submission."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright_practice.checks import Check
from meshwright_practice.interview.checks.registry import CHECKS
from meshwright_practice.interview.evidence import RunEvidence
from meshwright_practice.interview.exercise import STAGES, InterviewStage
from meshwright_practice.interview.runner import ProbeFailed


@dataclass(frozen=True)
class GateResult:
    """The checks of one stage. `not_checked` says of each check that could not be decided what it waits for."""

    stage: InterviewStage
    checks: tuple[Check, ...]
    not_checked: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.not_checked and all(check.passed for check in self.checks)


def applies(name: str, options: Mapping[str, str]) -> bool:
    answer = CHECKS[name].answer
    return answer is None or options[answer[0]] == answer[1]


def grade(
    evidence: RunEvidence, gates: Sequence[int], on_gate: Callable[[GateResult], None] | None = None
) -> list[GateResult]:
    """The results of these gates. A check of an earlier gate that a check requires is decided, but not reported."""
    decided: dict[str, Check] = {}

    def decide(name: str) -> Check | str:
        """The check, or the name of the one that it waits for."""
        for required in CHECKS[name].requires:
            earlier = decide(required)
            if isinstance(earlier, str) or not earlier.passed:
                return earlier if isinstance(earlier, str) else required
        if name not in decided:
            try:
                decided[name] = CHECKS[name].decide(evidence)
            except ProbeFailed as failed:
                decided[name] = Check(name, False, "the code runs", str(failed))
        return decided[name]

    results = []
    for stage in STAGES:
        if stage.gate not in gates:
            continue
        checks, waiting = [], {}
        for name in stage.checks:
            if not applies(name, evidence.options):
                continue
            decision = decide(name)
            if isinstance(decision, str):
                waiting[name] = decision
            else:
                checks.append(decision)
        results.append(GateResult(stage, tuple(checks), waiting))
        if on_gate is not None:
            on_gate(results[-1])
    return results
