"""Checks a file and describes the result, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright_practice.checks import Check, results
from meshwright_practice.interview.evidence import RunEvidence
from meshwright_practice.interview.exercise import CONTRACT
from meshwright_practice.interview.follow_ups import (
    FOUR_QUESTIONS,
    PRESSURE_QUESTIONS,
    FollowUp,
    questions_for,
    where_to_learn,
)
from meshwright_practice.interview.grade import GateResult, grade
from meshwright_practice.interview.review import Review, write_review
from meshwright_practice.interview.runner import SECONDS, Runner, scratch_folder
from meshwright_practice.interview.submission import Submission, read_submission


@dataclass(frozen=True)
class InterviewReport:
    submission: Submission
    results: list[GateResult]
    follow_ups: list[tuple[str, FollowUp]]
    review: Review

    @property
    def checks(self) -> list[Check]:
        return [check for result in self.results for check in result.checks]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


def check_file(
    path: Path,
    options: Mapping[str, str],
    answered: bool,
    gates: Sequence[int],
    seconds: float = SECONDS,
    on_gate: Callable[[GateResult], None] | None = None,
) -> InterviewReport:
    """Reads the user's file, runs it on forked ranks in a scratch folder, and decides the checks of these gates."""
    submission = read_submission(path)
    with scratch_folder() as scratch:
        evidence = RunEvidence(Runner(submission, scratch, seconds, options["device"] == "gpu"), options, answered)
        found = grade(evidence, gates, on_gate)
        review = write_review(evidence, found)
    failed = [check.name for result in found for check in result.checks if not check.passed]
    return InterviewReport(submission, found, questions_for(failed), review)


def gate_text(result: GateResult) -> str:
    """One gate: its checks, and what to do about those that failed."""
    state = "green" if result.passed else "not yet"
    lines = [f"gate {result.stage.gate}, {result.stage.title}: {state}"]
    for check in result.checks:
        lines.append(f"  {'ok ' if check.passed else 'no '} {check.name}: {check.found}")
        if not check.passed:
            lines.append(f"      expected {check.expected}")
            lines += [f"      {check.message}"] if check.message else []
    for required in dict.fromkeys(result.not_checked.values()):
        waiting = ", ".join(name for name, each in result.not_checked.items() if each == required)
        lines.append(f"  -   not checked before {required} passes: {waiting}")
    return "\n".join(lines)


def report_text(report: InterviewReport) -> str:
    """Remarks, gates, follow-up questions, the eight questions and the review."""
    blocks = ["\n".join(report.submission.remarks)] if report.submission.remarks else []
    blocks += [gate_text(result) for result in report.results]
    if report.follow_ups:
        lines = ["Follow-up questions, from what the code lacks"]
        for name, question in report.follow_ups:
            where = where_to_learn(question)
            lines += [
                f"  {question.question} ({name})",
                f"    listen for: {question.listen_for}" + (f" [{where}]" if where else ""),
            ]
        blocks.append("\n".join(lines))
    for title, questions in (("Four questions", FOUR_QUESTIONS), ("Four questions that press", PRESSURE_QUESTIONS)):
        blocks.append("\n".join([title, *(f"  {each.question}" for each in questions)]))
    blocks.append(f"Review\n\n{report.review.text()}")
    return "\n\n".join(blocks)


def report_json(report: InterviewReport) -> dict[str, Any]:
    """The contract of graded work, with the gates, the questions and the review."""
    waiting = {name: required for result in report.results for name, required in result.not_checked.items()}
    message = f"{len(waiting)} checks wait for others" if waiting else ""
    value = results(f"interview {report.submission.path.name}", report.checks, message)
    if waiting and value["status"] == "pass":
        value["status"] = "fail"
    return value | {
        "not_checked": waiting,
        "remarks": list(report.submission.remarks),
        "gates": {str(result.stage.gate): result.passed for result in report.results},
        "follow_ups": [{"check": name, **asdict(question)} for name, question in report.follow_ups],
        "review": asdict(report.review),
        "contract": [function.signature for function in CONTRACT.values()],
    }
