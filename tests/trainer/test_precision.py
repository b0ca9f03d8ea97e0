"""The loss scale adapts to overflows, and weights stay in float32 or float64."""

from __future__ import annotations

import torch

from meshwright.config import PrecisionConfig
from meshwright.trainer.precision import LossScale, Precision


def test_loss_scale_halves_on_overflow_and_doubles_after_its_interval():
    scaler = LossScale(8.0, 2, torch.device("cpu"))
    scales = []
    for finite in (False, True, True, True, False):
        scaler.update(torch.tensor(finite))
        scales.append(float(scaler.scale))
    assert scales == [4.0, 4.0, 8.0, 8.0, 4.0]


def test_weights_are_float32_except_in_fp64():
    cpu = torch.device("cpu")
    assert {c: Precision(PrecisionConfig(compute=c), cpu).weights for c in ("fp32", "bf16", "fp16", "fp64")} == {
        "fp32": torch.float32,
        "bf16": torch.float32,
        "fp16": torch.float32,
        "fp64": torch.float64,
    }
