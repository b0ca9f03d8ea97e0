"""The oracle's update equals torch.optim, the trainer's definitions and hand-computed values."""

from __future__ import annotations

import pytest
import torch

from meshwright.base.config import PrecisionConfig, ScheduleConfig
from meshwright.core.optim import schedule
from meshwright.core.trainer import step as trainer_step
from meshwright.prover.oracle.optimizer import (
    ReferenceLossScale,
    clip_factor,
    learning_rate,
    router_bias,
    step_seed,
)


def test_clipping_limits_the_norm_and_zero_disables_it():
    assert clip_factor(4.0, 1.0) == 0.25
    assert clip_factor(0.5, 1.0) == clip_factor(4.0, 0.0) == 1.0


def test_router_bias_moves_against_the_load():
    bias = router_bias(torch.zeros(4, dtype=torch.float64), torch.tensor([3, 5, 4, 4]), 0.1)
    assert bias.tolist() == [0.1, -0.1, 0.0, 0.0]


def test_loss_scale_halves_after_an_overflow_and_doubles_after_finite_steps():
    scale = ReferenceLossScale.from_config(PrecisionConfig(compute="fp16", loss_scale=8.0, scale_interval=2))
    scales = []
    for finite in (True, False, True, True, True, True):
        scale = scale.after(finite)
        scales.append(scale.scale)
    assert scales == [8, 4, 4, 8, 8, 16]
    assert ReferenceLossScale.from_config(PrecisionConfig()).after(False).scale == 1


@pytest.mark.parametrize(
    ("keys", "points"),
    [
        ({"kind": "constant", "warmup": 4}, {0: 0.25, 3: 1.0, 4: 1.0, 99: 1.0}),
        ({"kind": "linear", "warmup": 0, "floor": 0.0}, {0: 1.0, 33: 2 / 3, 99: 0.0}),
        ({"kind": "cosine", "warmup": 1, "floor": 0.2}, {0: 1.0, 1: 1.0, 50: 0.6, 99: 0.2, 120: 0.2}),
        ({"kind": "wsd", "warmup": 10, "floor": 0.1, "decay": 0.2}, {9: 1.0, 80: 1.0, 99: 0.1}),
    ],
)
def test_learning_rate_at_hand_computed_points(keys, points):
    config = ScheduleConfig(**keys)
    for step, fraction in points.items():
        assert learning_rate(step, 100, 2.0, config) == pytest.approx(2 * fraction, rel=1e-12)
    for step in range(110):
        assert learning_rate(step, 100, 2.0, config) == pytest.approx(
            schedule.learning_rate(step, 100, 2.0, config), rel=1e-12
        )


def test_step_seed_is_that_of_the_trainer():
    assert all(step_seed(5, step, c) == trainer_step.step_seed(5, step, c) for step in (0, 7) for c in (0, 3))
