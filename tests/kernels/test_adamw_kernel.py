"""AdamW on master weights: the torch function and the Triton kernel against torch's AdamW."""

import os
import subprocess
import sys

import pytest
import torch

from meshwright.kernels.adamw import AdamWTensors, adamw_torch, adamw_triton
from meshwright.kernels.triton_runtime import has_triton

BETAS, EPS, LR = (0.9, 0.95), 1e-8, 1e-2
SHAPES = [(), (1,), (1023,), (1025,), (3, 700), (0, 4)]


def updates(dtype, step=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index, shape in enumerate(SHAPES):
        master = torch.randn(shape, generator=generator)
        gradient = torch.randn(shape, generator=generator).to(dtype)
        state = (torch.zeros(shape), torch.zeros(shape), torch.tensor(step))
        made.append(AdamWTensors(master, master.bfloat16(), gradient, *state, LR * (1 + index), 0.1 * (index % 2)))
    return made


def torch_parameters(made, divisor, steps):
    groups = [{"params": [u.master.clone().requires_grad_()], "lr": u.lr, "weight_decay": u.weight_decay} for u in made]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPS, foreach=False)
    for _ in range(steps):
        for group, update in zip(groups, made, strict=True):
            group["params"][0].grad = update.gradient.float() / divisor
        optimizer.step()
    return [group["params"][0] for group in groups]


def check(update, dtype, rounding=2**-8):
    made = updates(dtype)
    expected = torch_parameters(made, 2.5, 3)
    for _ in range(3):
        for one in made:
            one.step.add_(1)
        update(made, BETAS, EPS, torch.tensor(2.5), torch.tensor(True))
    for one, parameter in zip(made, expected, strict=True):
        torch.testing.assert_close(one.master, parameter.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.weight.float(), one.master, rtol=rounding, atol=0)


def check_not_finite(update):
    made, before = updates(torch.bfloat16, 4.0), updates(torch.bfloat16, 4.0)
    update(made, BETAS, EPS, torch.tensor(float("nan")), torch.tensor(False))
    for one, old in zip(made, before, strict=True):
        for name in ("master", "weight", "exp_avg", "exp_avg_sq", "step", "gradient"):
            assert torch.equal(getattr(one, name), getattr(old, name)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_function_equals_the_adamw_of_torch_and_rounds_the_master(dtype):
    check(adamw_torch, dtype)


def test_torch_function_changes_nothing_in_a_step_that_is_not_finite():
    check_not_finite(adamw_torch)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_triton_kernel_equals_the_adamw_of_torch_and_changes_nothing_if_not_finite():
    """Triton reads the variable when a kernel is defined, so the interpreter needs a process of its own."""
    command = [sys.executable, __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    for dtype in (torch.bfloat16, torch.float32):
        check(adamw_triton, dtype, rounding=2**-7)  # the interpreter truncates
    check_not_finite(adamw_triton)
