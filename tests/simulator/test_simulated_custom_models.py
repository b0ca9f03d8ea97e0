"""A simulated step of a user's model equals its real step on forked ranks: every collective, and peak memory.

Gloo's reduce-scatter works on a copy of its input, which the simulation does not count; the peak may be there.
"""

from __future__ import annotations

from functools import cache

import pytest
from predicted_models import MODELS, config_for, count_real_step, custom_model, sources

from meshwright.launch.ranks import run_ranks
from meshwright.simulator.simulate import simulate

LAYOUTS = {
    "DDP": {},
    "DDP with accumulation": {"accumulation": 2},
    "ZeRO-1": {"shard": "optimizer", "accumulation": 2},
    "ZeRO-2": {"shard": "gradients", "accumulation": 2},
    "ZeRO-3": {"shard": "parameters"},
}
QUICK = (("Llama", "DDP"), ("Mixtral", "ZeRO-3"), ("CNN", "DDP with accumulation"), ("BERT", "ZeRO-1"))
ALL = tuple((model, layout) for model in MODELS for layout in LAYOUTS)


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
