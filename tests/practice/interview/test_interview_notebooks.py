"""The checker names the flaw of each notebook of known quality, and passes the good one."""

from __future__ import annotations

import json

import pytest
from meshwright_practice.interview.exercise import GATES, default_options
from meshwright_practice.interview.follow_ups import FOLLOW_UPS
from meshwright_practice.interview.report import check_file, report_json, report_text

from tests.practice.interview.notebook_sources import (
    DDP_SYNCS_ALWAYS,
    FLAWS,
    MORE_FLAWS,
    NOTEBOOKS,
    WITH_DDP,
    notebook,
    script,
)

DEMANDING = default_options() | {"scope": "production", "restart": "elastic"}


def failed(report):
    return [check.name for check in report.checks if not check.passed]


def test_notebooks_are_those_of_the_table():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {"good", *FLAWS}
    assert len(FLAWS) == 11
    for name in ("good", *FLAWS):
        text = (NOTEBOOKS / f"{name}.ipynb").read_text()
        assert text == notebook(name)
        assert json.loads(text)["nbformat"] == 4


def test_good_notebook_passes_every_check_also_the_demanding_ones():
    report = check_file(NOTEBOOKS / "good.ipynb", DEMANDING, True, GATES, 60)
    assert failed(report) == [], report_text(report)
    assert report.passed
    assert not report.follow_ups
    value = report_json(report)
    assert value["status"] == "pass"
    assert value["format"] == 1
    assert set(value["gates"].values()) == {True}
    figures = value["review"]["figures"]
    assert figures["reduced_bytes_per_step"] == figures["gradient_bytes"] == 776
    assert figures["resume_difference"] == 0
    assert figures["lost_steps"] == 1
    assert figures["checks_passed"] == figures["checks"] == 30


SEVERAL = (
    ("no_set_epoch", "resume_replays", "no_config_identity", "phases_not_timed"),
    ("padding_duplicates", "weights_only", "non_atomic_save", "gradients_averaged_twice", "rank_0_logs"),
    ("no_sampler", "resume_skips"),
)
"""Every flaw once; those of a row can be in one notebook."""


def test_every_flaw_is_in_one_notebook_with_others():
    assert sorted(flaw for row in SEVERAL for flaw in row) == sorted(FLAWS)


@pytest.mark.parametrize("flaws", SEVERAL, ids=len)
def test_several_flaws_of_a_notebook_are_named_and_nothing_else(flaws, tmp_path):
    path = tmp_path / "answer.py"
    path.write_text(script("good", *(FLAWS[flaw][:2] for flaw in flaws)))
    assert_flaws_are_named(check_file(path, default_options(), True, GATES, 60), flaws)


@pytest.mark.parametrize(
    "flaw", [flaw if flaw == "weights_only" else pytest.param(flaw, marks=pytest.mark.long) for flaw in FLAWS]
)
def test_flaw_is_named_and_nothing_else(flaw):
    report = check_file(NOTEBOOKS / f"{flaw}.ipynb", default_options(), True, GATES, 60)
    assert_flaws_are_named(report, [flaw])
    if flaw == "weights_only":
        assert "Weights alone" in next(check.message for check in report.checks if not check.passed)


def assert_flaws_are_named(report, flaws):
    """The checks of the flaws fail, and no others; each says what it found, and asks its question."""
    expected = {FLAWS[flaw][2] for flaw in flaws}
    assert set(failed(report)) == expected
    assert {name for name, _ in report.follow_ups} == expected
    for check in report.checks:
        if check.name in expected:
            assert check.message
            assert check.found
            assert FOLLOW_UPS[check.name].question in report_text(report)


@pytest.mark.long
@pytest.mark.parametrize("flaw", MORE_FLAWS)
def test_further_flaw_is_named_and_nothing_else(flaw, tmp_path):
    path = tmp_path / "answer.py"
    path.write_text(script(flaw))
    report = check_file(path, DEMANDING, True, GATES, 60)
    assert failed(report) == MORE_FLAWS[flaw][2].split(" and "), report_text(report)


@pytest.mark.long
def test_answer_with_ddp_passes_and_its_missing_no_sync_is_named(tmp_path):
    path = tmp_path / "answer.py"
    path.write_text(script("good", *WITH_DDP))
    assert failed(check_file(path, DEMANDING, True, GATES, 60)) == []
    path.write_text(script("good", *WITH_DDP, DDP_SYNCS_ALWAYS))
    assert failed(check_file(path, DEMANDING, True, GATES, 60)) == ["sync_once"]
