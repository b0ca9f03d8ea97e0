"""The checks of the lab on the design review: those of the scenario drills, on one fixed case."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.errors import ConfigError
from meshwright_practice.checks import Check
from meshwright_practice.interview.drills.answer import parse_answer
from meshwright_practice.interview.drills.case_figures import judge_case
from meshwright_practice.interview.drills.drill_grading import grade_answer
from meshwright_practice.interview.drills.scenarios import PARTS, SCENARIOS
from meshwright_practice.labs.work import Work

SCENARIO = SCENARIOS["substantially_exceeds"]
CASE = SCENARIO.cases[0]
"""The job that the starter describes."""
WRONG = "wrong_statement"


def grade(work: Work) -> None:
    answer = read_parts(work)
    checks = grade_answer(judge_case(SCENARIO, CASE), answer)
    for check in checks:
        if not check.name.endswith(WRONG):
            work.check(check.name, check.passed, check.expected, check.found, check.message)
    report_wrong(work, [check for check in checks if check.name.endswith(WRONG)])


def read_parts(work: Work) -> Mapping[str, str]:
    expected = "text under the headings Problem, Mechanism, Communication, Tradeoff and Measurement"
    try:
        answer = parse_answer(work.source, work.path.name)
    except ConfigError:
        work.stop(
            "five parts", expected, "none of the headings", "start again with --reset: it brings the headings back"
        )
    empty = [part for part in PARTS if not answer[part].strip()]
    hint = f"write the part {empty[0].capitalize()} next; --hint gives a hint" if empty else ""
    found = f"nothing under {', '.join(part.capitalize() for part in empty)}" if empty else "all five"
    work.require("five parts", not empty, expected, found, hint)
    return answer


def report_wrong(work: Work, wrong: list[Check]) -> None:
    found = f"a wrong statement in {wrong[0].name.partition('.')[0]}" if wrong else "none"
    message = wrong[0].message if wrong else ""
    work.check("no wrong statement", not wrong, "no statement that this job refutes", found, message)
