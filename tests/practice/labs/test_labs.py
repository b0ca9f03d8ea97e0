"""Every lab: its solution passes, its starter fails with a next step, and ten wrong solutions are told apart."""

from __future__ import annotations

import pytest
from meshwright_practice.labs.lab import FILE_CHECK
from meshwright_practice.labs.registry import ORDER, load_lab

from tests.practice.labs.lab_gradings import expected_check, grade_file, shipped_file, verdict, wrong_files

WRONG = [(name, path) for name in ORDER for path in wrong_files(name)]
FIRST_TWO = [(name, path) for name in ORDER for path in wrong_files(name)[:2]]


def label(value):
    return getattr(value, "stem", value)


@pytest.mark.parametrize("name", ORDER)
def test_solution_passes_every_check_that_the_lab_lists(name):
    grading = grade_file(name, shipped_file(name, "solution"))
    assert grading.passed, verdict(grading)
    assert tuple(check.name for check in grading.checks) == load_lab(name).all_checks


@pytest.mark.parametrize("name", ORDER)
def test_starter_fails_with_the_function_to_write_next(name):
    lab, grading = load_lab(name), grade_file(name, shipped_file(name, "starter"))
    failure = grading.first_failure
    assert failure is not None
    assert failure.message
    assert failure.expected
    assert grading.checks[0].name == FILE_CHECK
    assert grading.checks[0].passed
    if lab.functions:
        assert any(function.name in failure.message for function in lab.functions)
    assert "Traceback" not in f"{failure}{grading.output}"


def check_wrong(name, path):
    grading = grade_file(name, path)
    failed = [check for check in grading.checks if not check.passed]
    assert expected_check(path) in [check.name for check in failed], verdict(grading)
    assert all(check.message and check.expected and check.found for check in failed)
    assert "Traceback" not in f"{failed}{grading.output}"


@pytest.mark.parametrize(("name", "path"), FIRST_TWO, ids=label)
def test_wrong_solution_fails_the_check_that_its_docstring_names(name, path):
    check_wrong(name, path)


@pytest.mark.long
@pytest.mark.parametrize(("name", "path"), [pair for pair in WRONG if pair not in FIRST_TWO], ids=label)
def test_other_wrong_solutions_fail_the_check_that_their_docstrings_name(name, path):
    check_wrong(name, path)


@pytest.mark.long
@pytest.mark.parametrize("name", ORDER)
def test_ten_wrong_solutions_are_told_apart(name):
    paths = wrong_files(name)
    verdicts = {path.stem: verdict(grade_file(name, path)) for path in paths}
    same = [(a, b) for a in verdicts for b in verdicts if a < b and verdicts[a] == verdicts[b]]
    assert len(paths) >= 10
    assert not same


@pytest.mark.parametrize("name", ORDER)
def test_lab_is_complete(name):
    lab = load_lab(name)
    assert lab.id == name
    assert lab.title
    assert lab.problem
    assert len(lab.hints) >= 3
    assert lab.items
    assert all(1 <= item <= 156 for item in lab.items)
    assert lab.chapter.startswith("handbook/")
    assert len(set(lab.all_checks)) == len(lab.all_checks)
