"""Every optimizer equals its definition on hybrid layouts: updates and optimizer state, in float64."""

from __future__ import annotations

from functools import cache

import pytest
from test_hybrid_layouts import small_options
from traced_cases import FLOAT64, VARIATION, Case, check_cases

KINDS = ("muon", "adafactor", "sgd", "lion")
EIGHT_HYBRIDS = (
    "replicate=4",
    "replicate=2 shard=parameters tensor=2",
    "replicate=2 degree=2 shard=parameters expert=2 experts=4",
    "replicate=2 tensor=2 pipeline=2",
    "replicate=2 shard=gradients expert=2 experts=4 offload=true",
    "replicate=2 shard=parameters context=2 expert=4 experts=4 method=all-to-all separator=0",
    "replicate=2 shard=optimizer pipeline=2 context=2 schedule=zbv",
    "replicate=2 shard=parameters tensor=2 pipeline=2 schedule=interleaved",
)
QUICK = [
    Case(small_options("replicate=2 shard=parameters tensor=2", "--optimizer.kind=muon"), FLOAT64),
    Case(small_options("replicate=2 pipeline=2 expert=2 experts=4", "--optimizer.kind=muon"), FLOAT64),
]
LONG = [
    Case(small_options(row, f"--optimizer.kind={kind}"), run)
    for row in EIGHT_HYBRIDS
    for kind in KINDS
    for run in (FLOAT64, VARIATION)
]


@cache
def check_all(ranks: int, long: bool) -> dict[Case, tuple[bool, str]]:
    """The results of all quick or all long cases with this number of ranks, from one launch."""
    cases = [case for case in (LONG if long else QUICK) if case.ranks == ranks]
    return dict(zip(cases, check_cases(cases), strict=True))


def describe(case: Case) -> str:
    return f"{' '.join(option.removeprefix('--') for option in case.options[5:])}, {case.run}"


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)], ids=describe)
def test_optimizer_equals_its_definition_on_a_hybrid_layout(case):
    passed, measured = check_all(case.ranks, case in LONG)[case]
    assert passed, measured
