"""Gradings of labs in tests: the files of a lab, each graded once per session, from one warm process."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from meshwright_practice.labs.grader import Grading, grade
from meshwright_practice.labs.registry import load_lab

WRONG = Path(__file__).with_name("wrong")


@cache
def grade_file(name: str, path: Path) -> Grading:
    return grade(load_lab(name), path)


def shipped_file(name: str, stem: str) -> Path:
    return Path(str(files(f"meshwright_practice.labs.{name}").joinpath(stem + load_lab(name).suffix)))


def wrong_files(name: str) -> list[Path]:
    return sorted((WRONG / name).glob(f"[0-9]*{load_lab(name).suffix}"))


def expected_check(path: Path) -> str:
    """The name of the check that the first line of a wrong solution promises to fail."""
    found = re.search(r"Expected check: (.+?)\.(\"\"\"|$)", path.read_text().splitlines()[0])
    assert found, f"{path} does not start with a docstring that ends with: Expected check: NAME."
    return found[1]


def verdict(grading: Grading) -> tuple[tuple[str, str], ...]:
    """What a user is told: the checks that failed, and what to look at."""
    return tuple((check.name, check.message) for check in grading.checks if not check.passed)
