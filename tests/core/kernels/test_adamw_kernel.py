"""AdamW on master weights: the torch function and the Triton kernel against torch's AdamW."""

import os
import subprocess
import sys

import pytest
import torch

from meshwright.core.kernels import adamw
from meshwright.core.kernels.adamw import AdamWSettings, MasterTensors
from meshwright.core.kernels.triton_runtime import has_triton

SETTINGS = AdamWSettings(1e-2, (0.9, 0.95), 1e-8)
SHAPES = [(), (1,), (1023,), (2049,), (3, 700), (0, 4), (5,)]
WITHOUT_GRADIENT = 6


def tensors() -> MasterTensors:
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(shape, generator=generator) for shape in SHAPES]
    moments = [[torch.zeros(shape) for shape in SHAPES] for _ in range(2)]
    factors, decays = [1.0 + index for index in range(len(SHAPES))], [0.1 * (index % 2) for index in range(len(SHAPES))]
    weights = [master.bfloat16() for master in masters]
    weights[0] = masters[0]  # a parameter without a master weight of its own
    return MasterTensors(masters, weights, *moments, torch.zeros(len(SHAPES)), factors, decays)


def gradients(dtype):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [*made[:WITHOUT_GRADIENT], None]


def torch_parameters(made, slopes, divisor, steps):
    factors = zip(made.masters, made.lr_factors, made.weight_decays, strict=True)
    groups = [{"params": [m.clone().requires_grad_()], "lr": SETTINGS.lr * f, "weight_decay": d} for m, f, d in factors]
    optimizer = torch.optim.AdamW(groups, betas=SETTINGS.betas, eps=SETTINGS.eps, foreach=False)
    for _ in range(steps):
        for group, slope in zip(groups, slopes, strict=True):
            group["params"][0].grad = None if slope is None else slope.float() / divisor
        optimizer.step()
    return [group["params"][0].detach() for group in groups]


def check(dtype, rounding):
    made, slopes = tensors(), gradients(dtype)
    expected = torch_parameters(made, slopes, 2.5, 3)
    for _ in range(3):
        made.update(slopes, SETTINGS, torch.tensor(2.5), torch.tensor(True))
    for master, weight, parameter in zip(made.masters, made.weights, expected, strict=True):
        torch.testing.assert_close(master, parameter, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(weight.float(), master, rtol=rounding, atol=0)
    assert made.steps.tolist() == [3.0] * WITHOUT_GRADIENT + [0.0]


def check_not_finite():
    made, before = tensors(), tensors()
    made.update(gradients(torch.bfloat16), SETTINGS, torch.tensor(float("nan")), torch.tensor(False))
    for name in ("masters", "weights", "exp_avgs", "exp_avg_sqs", "steps"):
        assert all(map(torch.equal, getattr(made, name), getattr(before, name))), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_function_equals_the_adamw_of_torch_and_rounds_the_master(dtype):
    check(dtype, rounding=2**-8)


def test_torch_function_changes_nothing_in_a_step_that_is_not_finite():
    check_not_finite()


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_triton_kernel_equals_the_adamw_of_torch_and_changes_nothing_if_not_finite():
    """Triton reads the variable when a kernel is defined, so the interpreter needs a process of its own."""
    command = [sys.executable, __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "adamw_triton\n"


if __name__ == "__main__":
    chosen = set()
    of_triton = adamw.adamw_triton
    adamw.adamw_triton = lambda *args: (chosen.add("adamw_triton"), of_triton(*args))
    for gradient_dtype in (torch.bfloat16, torch.float32):
        check(gradient_dtype, rounding=2**-7)  # the interpreter truncates
    check_not_finite()
    print(*chosen)
