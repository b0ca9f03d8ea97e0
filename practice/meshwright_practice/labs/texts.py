"""What the terminal shows of labs: the problem, a grading, hints and the list. Torch-free."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from meshwright_practice.checks import Check
from meshwright_practice.labs.grader import Grading
from meshwright_practice.labs.lab import Lab
from meshwright_practice.labs.workspace import LabRecord

WIDTH = 100
OUTPUT_LINES = 20


def wrapped(text: str, indent: str = "", first: str | None = None) -> str:
    start = indent if first is None else first
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=indent, break_long_words=False)


def describe_problem(lab: Lab, path: Path) -> str:
    """The introduction, shown when the starter is copied."""
    functions = [wrapped(f"{function}: {function.purpose}", " " * 6, "    ") for function in lab.functions]
    heading = f"Write these functions in {path}:" if functions else f"Write your answer into {path}."
    return "\n".join([lab.title, "", wrapped(lab.problem), "", heading, *functions, ""])


def describe_check(check: Check) -> list[str]:
    if check.passed:
        return [f"  pass  {check.name}"]
    details = (("expected", check.expected), ("found", check.found), ("next", check.message))
    shown = [wrapped(text, " " * 18, f"        {name:<10}") for name, text in details if text]
    return [f"  FAIL  {check.name}", *shown]


def describe_grading(grading: Grading, path: Path, recorded: bool = True) -> str:
    """Every check that ran, what the user's code printed, and the total. `recorded`: the progress counts it."""
    lines = [f"{grading.lab.title} ({path})"]
    for check in grading.checks:
        lines += describe_check(check)
    if printed := grading.output.strip().splitlines():
        cut = [f"  ... {len(printed) - OUTPUT_LINES} lines before these"] if len(printed) > OUTPUT_LINES else []
        lines += ["  output of the file:", *cut, *(f"    {line[:WIDTH]}" for line in printed[-OUTPUT_LINES:])]
    done, total = sum(check.passed for check in grading.checks), len(grading.lab.all_checks)
    not_run = f", {len(grading.not_run)} did not run" if grading.not_run else ""
    lines.append(f"{done} of {total} checks pass{not_run}.")
    if grading.passed:
        done_text = "The lab is done. --solution shows the reference solution."
        lines.append(done_text if recorded else "The file passes. The progress does not change.")
    return "\n".join(lines)


def describe_hint(lab: Lab, number: int, text: str) -> str:
    more = "; --hint again gives the next one" if number < len(lab.hints) else ", the last one"
    return f"{wrapped(text)}\n(hint {number} of {len(lab.hints)}{more})"


def describe_list(records: Sequence[tuple[Lab, LabRecord]]) -> str:
    width = max(len(lab.id) for lab, _ in records)
    rows = [f"  {lab.id:<{width}}  {record.describe():<22}  {lab.title}" for lab, record in records]
    passed = sum(record.passed for _, record in records)
    return "\n".join([*rows, f"{passed} of {len(records)} labs passed."])
