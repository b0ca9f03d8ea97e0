"""Every optimizer equals its definition on hybrid layouts: updates and optimizer state, in float64."""

from __future__ import annotations

import pytest

from tests.prover.test_hybrid_layouts import small_options
from tests.prover.traced_cases import FLOAT64, VARIATION, Case, check_cases

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
QUICK = (
    ("replicate=2 shard=parameters tensor=2", "muon"),
    ("replicate=2 pipeline=2 expert=2 experts=4", "muon"),
)
LONG = tuple((row, kind) for row in EIGHT_HYBRIDS for kind in KINDS)


@pytest.mark.parametrize(
    ("row", "kind"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)], ids=str
)
@pytest.mark.timeout(600)
def test_optimizer_equals_its_definition_on_a_hybrid_layout(row, kind):
    for run in (FLOAT64,) if (row, kind) in QUICK else (FLOAT64, VARIATION):
        [(passed, measured)] = check_cases([Case(small_options(row, f"--optimizer.kind={kind}"), run)])
        assert passed, f"{run}: {measured}"
