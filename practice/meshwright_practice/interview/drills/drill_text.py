"""Shows a drill: the list, the question, the graded answer, and the planner's own answer after it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshwright_practice.checks import Check, results
from meshwright_practice.interview.drills.case_figures import DrillCase
from meshwright_practice.interview.drills.drill_grading import scores
from meshwright_practice.interview.drills.scenarios import PARTS, SCENARIOS


def scenario_list() -> str:
    lines = ["Scenario drills: meshwright practice interview --drill NAME [--seed N] [--answer FILE]"]
    return "\n".join([*lines, *(f"  {name:<22} {scenario.question}" for name, scenario in SCENARIOS.items())])


def question_text(case: DrillCase, seed: int) -> str:
    headings = ", ".join(f"{part.capitalize()}:" for part in PARTS)
    return (
        f"{case.text()}\n\nAnswer in five parts with the headings {headings} Name the state that moves, the collective "
        "and its bytes, the price and the metric, with numbers and units. Then: "
        f"--drill {case.scenario.name} --seed {seed} --answer FILE"
    )


def drill_text(case: DrillCase, checks: list[Check]) -> str:
    """What each part lacks, then the planner's answer."""
    lines = []
    for part, score in scores(checks).items():
        lines.append(f"{part}: {score:.0%}")
        for check in checks:
            if check.name.partition(".")[0] == part:
                lines.append(f"  {'ok ' if check.passed else 'no '} {check.name.partition('.')[2]}: {check.found}")
                lines += [] if check.passed else [f"      {check.message}", f"      expected {check.expected}"]
    lines += ["", "The planner's answer"]
    explanation = case.explanation()
    for part in PARTS:
        lines += [part.capitalize(), *(f"  {sentence}" for sentence in getattr(explanation, part))]
    return "\n".join(lines)


def drill_json(case: DrillCase, seed: int, checks: list[Check]) -> dict[str, Any]:
    value = results(f"drill {case.scenario.name}", checks)
    return value | {"seed": seed, "text": case.text(), "scores": scores(checks), "planner": asdict(case.explanation())}
