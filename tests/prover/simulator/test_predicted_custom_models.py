"""What `simulate` and `plan` predict of a user's model, beside the counters of its real step on forked ranks.

A simulated step equals the real one: every collective, and peak memory. The planner's memory is within 5 %.

Gloo's reduce-scatter works on a copy of its input, which the simulation does not count; the peak may be there.
"""

from __future__ import annotations

from functools import cache

import pytest

from meshwright.core.launch.ranks import run_ranks
from meshwright.core.trainer.records.trace_custom_model import trace_workload
from meshwright.planner.calibration.run_prediction import UNKNOWN_HOST
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.prover.simulator.simulate import simulate
from tests.kit.predicted_models import MODELS, config_for, count_real_step, custom_model, sources

LAYOUTS = {
    "DDP": {},
    "DDP with accumulation": {"accumulation": 2},
    "ZeRO-1": {"shard": "optimizer", "accumulation": 2},
    "ZeRO-2": {"shard": "gradients", "accumulation": 2},
    "ZeRO-3": {"shard": "parameters"},
    "tensor": {"replicate": 1, "tensor": 2},
    "pipeline": {"replicate": 1, "pipeline": 2, "micro": 1, "accumulation": 4},
    "context": {"replicate": 1, "context": 2},
}
DATA_PARALLEL = [layout for layout in LAYOUTS if layout not in ("tensor", "pipeline", "context")]
QUICK = (("Mixtral", "ZeRO-3"), ("CNN", "DDP with accumulation"), ("GPT-2", "pipeline"))
ALL = (
    *((model, layout) for model in MODELS for layout in DATA_PARALLEL),
    *((model, layout) for model in ("Llama", "Qwen3", "Mistral") for layout in ("tensor", "pipeline", "context")),
    *((model, "pipeline") for model in ("GPT-2", "ViT")),
    ("Mixtral", "tensor"),
)


def count_steps(world, cases):
    return [count_real_step(world, config_for(**LAYOUTS[layout]), model) for model, layout in cases]


@cache
def measured(cases):
    """Runs all cases in one launch."""
    return dict(zip(cases, run_ranks(count_steps, 2, cases, timeout=230.0)[0], strict=True))


@pytest.mark.parametrize("case", QUICK, ids=", ".join)
def test_simulated_step_of_a_custom_model_equals_its_real_step(case):
    assert_equal(case, measured(QUICK)[case])


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=", ".join)
def test_simulated_step_of_every_custom_model_equals_its_real_step(case):
    assert_equal(case, measured(ALL)[case])


def assert_equal(case, real):
    model, layout = case
    rows, peak, _, total = real
    simulated = simulate(config_for(**LAYOUTS[layout]), [0], custom_model(model), sources(model)).results[0]
    assert simulated.communication == rows
    assert simulated.peak["parameter"] == peak["parameter"]
    assert simulated.peak["gradient"] == peak["gradient"]
    assert simulated.peak_total == pytest.approx(total, rel=0.01)
    assert planned_memory(model, config_for(**LAYOUTS[layout])) == pytest.approx(total, rel=0.05)


def planned_memory(name, config):
    traced = trace_workload(custom_model(name), config, sources(name))
    return estimate_memory(PlannedJob.from_config(config, UNKNOWN_HOST, traced=traced))[0].tensors
