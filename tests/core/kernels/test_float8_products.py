"""Float8 products: the error of a cast, forward and backward against their definition, and compiled graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

from meshwright.core.kernels.float8 import Float8, float8_linear, to_float8, to_float8_both
from meshwright.core.kernels.triton_runtime import has_triton

ROUNDING = 2.0**-4
"""The largest relative error of a float8 with 3 bits of mantissa."""
SMALLEST_STEP = 2.0**-9
"""The distance of the float8 next to zero."""


def values_of(matrix: Float8) -> Tensor:
    return matrix.values.double() * matrix.scale.double()


def random_matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows and columns of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(rows, 1, generator=generator).exp() * torch.randn(1, columns, generator=generator).exp()
    return (torch.randn(rows, columns, generator=generator) * scales).bfloat16()


@pytest.mark.parametrize("magnitude", [1.0, 1e-12, 1e25])
def test_cast_is_within_half_a_step_of_every_element(magnitude):
    x = random_matrix(48, 80) * magnitude
    for matrix, expected in zip(to_float8_both(x), (x, x.t()), strict=True):
        error = (values_of(matrix) - expected.double()).abs()
        limit = torch.maximum(expected.double().abs() * ROUNDING, matrix.scale.double() * SMALLEST_STEP / 2)
        assert (error <= limit * (1 + 2.0**-20)).all()
        assert (matrix.values.float().abs().amax(1) == 448).all()


def test_columns_are_padded_with_zeros_to_a_multiple_of_16():
    x = random_matrix(21, 32)
    _, columns = to_float8_both(x)
    assert columns.values.shape == (32, 32)
    assert not columns.values[:, 21:].float().any()
    assert torch.equal(columns.values[:, :21].float(), to_float8(x.t().contiguous()).values.float())


def test_a_row_of_zeros_has_a_finite_scale_and_other_rows_keep_what_is_not_finite():
    x = torch.zeros(16, 16, dtype=torch.bfloat16)
    assert not values_of(to_float8(x)).any()
    x[3, 4], x[5, 6] = float("nan"), float("inf")
    assert to_float8(x).values.float().isnan().any(dim=1).nonzero().flatten().tolist() == [3, 5]


def test_forward_and_backward_equal_the_products_of_cast_matrices():
    x, weight = random_matrix(42, 48).requires_grad_(), random_matrix(32, 48, seed=1).requires_grad_()
    gradient = random_matrix(42, 32, seed=2) * 1e-6
    output = float8_linear(x.view(2, 21, 48), weight)
    output.backward(gradient.view(2, 21, 32))
    by_rows = {name: values_of(to_float8(m.detach())) for name, m in (("x", x), ("w", weight), ("g", gradient))}
    by_columns = {
        name: values_of(to_float8(m.detach().t().contiguous())).t()
        for name, m in (("x", x), ("w", weight), ("g", gradient))
    }
    expected = (
        (output.flatten(0, 1), by_rows["x"] @ by_rows["w"].t()),
        (x.grad, by_rows["g"] @ by_columns["w"]),
        (weight.grad, by_columns["g"].t() @ by_columns["x"]),
    )
    for found, exact in expected:
        limit = 2.0**-8 * exact.abs() + 2.0**-20 * exact.abs().max()  # rounded to bf16 from a sum in float32
        assert ((found.double() - exact).abs() <= limit).all()


def test_a_frozen_weight_gets_no_gradient_and_without_gradients_nothing_is_saved():
    x, weight = random_matrix(16, 32).requires_grad_(), random_matrix(48, 32)
    output = float8_linear(x, weight)
    output.sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert torch.equal(float8_linear(x, weight), output)


def test_flops_of_a_step_are_those_of_three_products():
    x, weight = random_matrix(16, 32).requires_grad_(), random_matrix(48, 32).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        float8_linear(x, weight).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 16 * 32 * 48


class Projections(nn.Module):
    """Two products of the same input, and one of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = (nn.Parameter(random_matrix(64, 64, seed)) for seed in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return float8_linear(float8_linear(x, self.q) + float8_linear(x, self.k), self.out)


def test_compiled_products_share_the_cast_of_their_input_and_save_nothing_of_the_weights():
    model, x = Projections(), random_matrix(32, 64, seed=4).requires_grad_()
    graphs = []

    def record(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    inputs = (x, *model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), inputs)
    for one, other in zip(torch.autograd.grad(compiled(x).square().sum(), inputs), expected, strict=True):
        assert torch.equal(one, other)
    forward, backward = (Counter(str(node.target) for node in graph.graph.nodes) for graph in graphs)
    assert forward["meshwright.float8_cast_both.default"] == 2  # x, and the sum
    assert backward["meshwright.float8_input_gradient.default"] == 3
    saved = [node.meta["val"] for node in graphs[1].graph.nodes if node.op == "placeholder"]
    assert sum(value.dtype == torch.float8_e4m3fn for value in saved) == 2  # the two inputs by columns


INTERPRETED = """
import torch
from meshwright.core.kernels.float8 import LARGEST, SMALLEST_AMAX
from meshwright.core.kernels.float8_kernel import cast

# Values in float32: the interpreter does not round to float8 as a device does.
for rows, columns, padded in [(50, 48, 64), (600, 144, 608)]:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3] = 0
    row_amax, column_amax = torch.zeros(rows), torch.zeros(columns)
    by_rows, row_scale = torch.empty(rows, columns), torch.empty(rows, 1)
    by_columns, column_scale = torch.empty(columns, padded), torch.empty(columns, 1)
    cast(x, row_amax, column_amax, (by_rows, row_scale), (by_columns, column_scale), LARGEST, SMALLEST_AMAX)
    for amax, scale, dim in ((row_amax, row_scale, 1), (column_amax, column_scale, 0)):
        assert torch.equal(amax, x.float().abs().amax(dim))
        assert torch.equal(scale[:, 0], amax.clamp(min=SMALLEST_AMAX) / LARGEST)
    row_factor, column_factor = (
        torch.full_like(amax, LARGEST) / amax.clamp(min=SMALLEST_AMAX) for amax in (row_amax, column_amax)
    )
    assert torch.equal(by_rows, x.float() * row_factor[:, None])
    assert torch.equal(by_columns[:, :rows], (x.float() * column_factor).t())
    assert not by_columns[:, rows:].any()
    alone = torch.full_like(by_columns, 7)
    cast(x, None, column_amax.zero_(), (None, None), (alone, column_scale), LARGEST, SMALLEST_AMAX)
    assert torch.equal(alone, by_columns)
"""


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_triton_kernels_equal_their_torch_functions_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when triton is imported
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, timeout=120, check=True)
