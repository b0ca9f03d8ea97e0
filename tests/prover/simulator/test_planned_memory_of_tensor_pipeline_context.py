"""The planned and the simulated peak memory of tensor, pipeline and context parallelism are within 3 %."""

from __future__ import annotations

import pytest

from meshwright.base.topology.unsupported import validate
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.prover.simulator.simulate import simulate_rank
from tests.kit.hybrid_layouts import MACHINE
from tests.kit.small_run import load_cpu_config

SMALL = (
    "--model.vocab=1024 --model.width=256 --model.layers=8 --model.heads=16 --model.kv_heads=8 --model.ffn=896"
    " --data.sequence=512 --layout.tensor=4 --layout.pipeline=4 --layout.context=2 --layout.replicate=1"
    " --batch.micro=1 --batch.global=4"
)
PRECISIONS = {"fp32": "", "bf16": "--precision.compute=bf16"}
BF16_WEIGHTS = "--precision.compute=bf16 --precision.weights=bf16"


def planned_over_simulated(overrides: str) -> float:
    """The ratio for rank 0, which has the most micro-batches in flight."""
    config = load_cpu_config(overrides=[*SMALL.split(), *overrides.split()])
    simulated = simulate_rank(config, *validate(config), 0)
    return estimate(PlannedJob.from_config(config, MACHINE)).memory_by_rank[0].tensors / simulated.peak_total


@pytest.mark.parametrize("name", PRECISIONS)
def test_planned_memory_is_within_3_percent_of_the_simulated_one(name):
    assert planned_over_simulated(PRECISIONS[name]) == pytest.approx(1, abs=0.03)


def test_planned_memory_with_bf16_weights_is_within_3_percent_of_the_simulated_one():
    """An unfused norm saves its bf16 input and its normalized input as float32 for backward."""
    assert planned_over_simulated(BF16_WEIGHTS) == pytest.approx(1, abs=0.03)
