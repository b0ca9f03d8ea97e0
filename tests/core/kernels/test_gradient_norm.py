"""The norm of many tensors: the torch function and the Triton kernel against a sum in float64."""

import os
import subprocess
import sys

import pytest
import torch

from meshwright.core.kernels import gradient_norm
from meshwright.core.kernels.gradient_norm import can_read, square_sum
from meshwright.core.kernels.triton_runtime import has_triton

SHAPES = [(), (1,), (8191,), (8193,), (3, 700), (0, 4), (2, 5, 7)]


def tensors():
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [*made, made[4].mT, made[2].bfloat16(), made[6].bfloat16()]


def check():
    expected = sum(tensor.double().square().sum() for tensor in tensors())
    found = square_sum(tensors(), torch.float32)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    broken = [*tensors(), torch.tensor([1.0, float("nan")])]
    assert square_sum(broken, torch.float32).isnan()


def test_torch_function_equals_a_sum_in_float64():
    check()
    precise = [tensor.double() for tensor in tensors()]
    expected = sum(tensor.square().sum() for tensor in precise)
    torch.testing.assert_close(square_sum(precise, torch.float64), expected, rtol=1e-14, atol=0)


def test_no_tensors_have_the_norm_zero():
    assert square_sum([], torch.float32) == 0
    assert square_sum([torch.zeros(0)], torch.float32) == 0


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_triton_kernel_equals_a_sum_in_float64():
    """Triton reads the variable when a kernel is defined, so the interpreter needs a process of its own."""
    command = [sys.executable, __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "square_sum_triton\n"


if __name__ == "__main__":
    chosen = set()
    of_triton = gradient_norm.square_sum_triton
    gradient_norm.square_sum_triton = lambda *args: (chosen.add("square_sum_triton"), of_triton(*args))[1]
    check()
    assert can_read(torch.zeros(3, 4).mT)
    assert not any(map(can_read, (torch.zeros(3, 4)[:, :2], torch.zeros(3, 1).expand(3, 4), torch.zeros(3).double())))
    torch.testing.assert_close(square_sum([torch.ones(3, 4)[:, :2]], torch.float32), torch.tensor(6.0).double())
    print(*chosen)
