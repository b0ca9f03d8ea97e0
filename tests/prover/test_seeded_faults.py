"""Every seeded fault of the training loop is found, and named by the first wrong quantity and the likely cause."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.prover import (
    context_expert_faults,
    data_parallel_faults,
    optimizer_faults,
    pipeline_faults,
    tensor_parallel_faults,
)
from tests.prover.seeded_faults import FAULTS, MODEL
from tests.prover.traced_cases import Case, check_cases, long_unless

MODULES = (data_parallel_faults, tensor_parallel_faults, context_expert_faults, pipeline_faults, optimizer_faults)
LAUNCHES = Counter((fault.layout, run) for fault in FAULTS.values() for run in fault.runs)
"""The proof runs of all faults, and how many faults share each."""


@cache
def check_launch(layout: tuple[str, ...], run: str) -> dict[str, tuple[bool, str]]:
    """The results of all faults of a proof run, and of the run without a fault (''), from one launch."""
    cases = {"": Case((*MODEL, *layout), run)}
    for name, fault in FAULTS.items():
        if fault.layout == layout and run in fault.runs:
            cases[name] = Case((*MODEL, *layout), run, fault.inject)
    return dict(zip(cases, check_cases(list(cases.values())), strict=True))


def test_101_faults_are_seeded():
    assert len(FAULTS) == 101
    assert {fault.inject.__module__ for fault in FAULTS.values()} == {module.__name__ for module in MODULES}


@pytest.mark.parametrize(
    ("layout", "run"),
    [pytest.param(*launch, marks=long_unless(LAUNCHES[launch] > 6)) for launch in sorted(LAUNCHES)],
    ids=lambda part: part if isinstance(part, str) else " ".join(part),
)
def test_run_without_fault_equals_the_reference(layout, run):
    passed, measured = check_launch(layout, run)[""]
    assert passed, measured


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=long_unless(all(LAUNCHES[fault.layout, run] > 6 for run in fault.runs)))
        for name, fault in FAULTS.items()
    ],
)
def test_seeded_fault_is_found_and_named(name):
    fault = FAULTS[name]
    for run in fault.runs:
        passed, measured = check_launch(fault.layout, run)[name]
        assert not passed, f"not found: {measured}"
        assert all(phrase in measured for phrase in fault.expected), measured
