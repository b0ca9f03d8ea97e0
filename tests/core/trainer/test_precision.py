"""The loss scale adapts to overflows, and weights stay in float32 or float64, and switches decide about bits."""

from __future__ import annotations

import pytest
import torch

from meshwright.base.config import PrecisionConfig
from meshwright.core.trainer.precision import LossScale, Precision, named_operators, set_determinism
from meshwright.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def switches():
    """Restores torch's switches after a test."""
    yield
    set_determinism(PrecisionConfig(), 1, CPU)
    torch.use_deterministic_algorithms(False)


def test_loss_scale_halves_on_overflow_and_doubles_after_its_interval():
    scaler = LossScale(8.0, 2, torch.device("cpu"))
    scales = []
    for finite in (False, True, True, True, False):
        scaler.update(torch.tensor(finite))
        scales.append(float(scaler.scale))
    assert scales == [4.0, 4.0, 8.0, 8.0, 4.0]


def test_parameters_are_float32_except_in_fp64():
    cpu = torch.device("cpu")
    assert {c: Precision(PrecisionConfig(compute=c), cpu).parameters for c in ("fp32", "bf16", "fp16", "fp64")} == {
        "fp32": torch.float32,
        "bf16": torch.float32,
        "fp16": torch.float32,
        "fp64": torch.float64,
    }


def test_operator_without_deterministic_implementation_is_an_error_that_names_it(switches):
    set_determinism(PrecisionConfig(deterministic=True), 1, CPU)
    problem = r"deterministic = true, .* no deterministic implementation of put_"
    with pytest.raises(ConfigError, match=problem), named_operators():
        torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2))
    set_determinism(PrecisionConfig(deterministic=False), 1, CPU)
    torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2))


def test_tf32_is_off_unless_it_is_asked_for_on_cuda(switches):
    torch.set_float32_matmul_precision("high")
    set_determinism(PrecisionConfig(), 1, CPU)
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert "tf32" not in (torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision)
    set_determinism(PrecisionConfig(tf32=True, deterministic=False), 1, torch.device("cuda"))
    assert torch.backends.cuda.matmul.fp32_precision == torch.backends.cudnn.conv.fp32_precision == "tf32"
    set_determinism(PrecisionConfig(tf32=True), 1, CPU)
    assert torch.get_float32_matmul_precision() == "highest"
