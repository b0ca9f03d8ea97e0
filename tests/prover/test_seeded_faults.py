"""Every seeded fault of a layout is found, and named by the first wrong quantity, its factor and the likely cause."""

from __future__ import annotations

from functools import cache

import context_expert_faults
import data_parallel_faults
import pipeline_faults
import pytest
import tensor_parallel_faults
from layout_checks import Case, check_cases, failed_claims
from seeded_faults import FAULTS

MODULES = (data_parallel_faults, tensor_parallel_faults, context_expert_faults, pipeline_faults)
LAYOUTS = sorted({fault.layout for fault in FAULTS.values()})


@cache
def check_layout(layout: tuple[str, ...]) -> dict[str, list[tuple[str, bool, str]]]:
    """The results of all faults of a layout, and of the layout without a fault (''), from one launch."""
    faults = {name: fault for name, fault in FAULTS.items() if fault.layout == layout}
    proofs = tuple(sorted({index for fault in faults.values() for index in fault.proofs}))
    cases = {"": Case(layout, proofs)} | {name: fault.case for name, fault in faults.items()}
    return dict(zip(cases, check_cases(list(cases.values())), strict=True))


def test_90_faults_are_seeded():
    assert len(FAULTS) == 90
    assert {fault.inject.__module__ for fault in FAULTS.values()} == {module.__name__ for module in MODULES}


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_layout_without_fault_equals_single_process(layout):
    assert failed_claims(check_layout(layout)[""]) == []


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_fault_is_found_and_named(name):
    fault = FAULTS[name]
    for claim, passed, measured in check_layout(fault.layout)[name]:
        assert not passed, f"not found: {claim}"
        assert all(phrase in measured for phrase in fault.expected), measured
