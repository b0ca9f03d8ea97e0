"""Every fault of a user's config is found by the proof runs of that config, and named."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.prover import loop_faults, settings_faults, shared_model_faults, shrunk_away_faults
from tests.prover.traced_cases import Case, check_cases, long_unless
from tests.prover.user_faults import USER_FAULTS

MODULES = (shrunk_away_faults, settings_faults, loop_faults, shared_model_faults)
LAUNCHES = Counter((fault.options, run) for fault in USER_FAULTS.values() for run in fault.runs)
"""The proof runs of all faults, and how many faults share each."""


@cache
def check_launch(options: tuple[str, ...], run: str) -> dict[str, tuple[bool, str]]:
    """The results of all faults of a proof run, and of the run without a fault (''), from one launch."""
    cases = {"": Case(options, run)}
    for name, fault in USER_FAULTS.items():
        if fault.options == options and run in fault.runs:
            cases[name] = Case(options, run, fault.inject)
    return dict(zip(cases, check_cases(list(cases.values())), strict=True))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_class_has_more_than_eleven_faults(module):
    assert sum(fault.inject.__module__ == module.__name__ for fault in USER_FAULTS.values()) > 11


@pytest.mark.parametrize(
    ("options", "run"),
    [pytest.param(*launch, marks=long_unless(LAUNCHES[launch] > 5)) for launch in sorted(LAUNCHES)],
    ids=lambda part: part if isinstance(part, str) else " ".join(part[6:]),
)
def test_run_without_fault_equals_the_reference(options, run):
    passed, measured = check_launch(options, run)[""]
    assert passed, measured


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=long_unless(all(LAUNCHES[fault.options, run] > 5 for run in fault.runs)))
        for name, fault in USER_FAULTS.items()
    ],
)
def test_fault_is_found_and_named(name):
    fault = USER_FAULTS[name]
    for run in fault.runs:
        passed, measured = check_launch(fault.options, run)[name]
        assert not passed, f"not found: {measured}"
        assert all(phrase in measured for phrase in fault.expected), measured
