"""Float8 on CUDA: casts of the Triton kernels bit for bit, and products against float64."""

import pytest
import torch
from torch import Tensor

from meshwright.core.kernels.float8 import Float8, cast_columns, float8_linear, pad, to_float8, to_float8_both

pytestmark = pytest.mark.cuda


def random_matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Rows and columns of very different magnitudes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x, by_row, by_column = (
        torch.randn(*shape, device="cuda", generator=generator) for shape in ((rows, columns), (rows, 1), (1, columns))
    )
    return (x * by_row.exp() * by_column.exp()).bfloat16()


def values_of(matrix: Float8) -> Tensor:
    return matrix.values.double() * matrix.scale.double()


@pytest.mark.parametrize(("rows", "columns"), [(2048, 1024), (1000, 48), (16, 4112)])
def test_kernels_cast_as_their_torch_functions_do(rows, columns):
    x = random_matrix(rows, columns, 0)
    x[3] = 0
    by_rows, by_columns = to_float8_both(x)
    transposed = to_float8(pad(x.t()).contiguous())
    for found, expected in ((by_rows, to_float8(x)), (by_columns, transposed), (cast_columns(x), transposed)):
        assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
        torch.testing.assert_close(found.scale, expected.scale, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
def test_products_are_those_of_the_cast_matrices(compiled):
    x, weight = random_matrix(1000, 512, 0).requires_grad_(), random_matrix(768, 512, 1).requires_grad_()
    gradient = random_matrix(1000, 768, 2) * 1e-6
    linear = torch.compile(float8_linear, fullgraph=True) if compiled else float8_linear
    output = linear(x, weight)
    output.backward(gradient)
    rows = {name: values_of(to_float8(m.detach())) for name, m in (("x", x), ("w", weight), ("g", gradient))}
    columns = {
        name: values_of(to_float8(m.detach().t().contiguous())).t()
        for name, m in (("x", x), ("w", weight), ("g", gradient))
    }
    expected = (
        (output, rows["x"] @ rows["w"].t()),
        (x.grad, rows["g"] @ columns["w"]),
        (weight.grad, columns["g"].t() @ columns["x"]),
    )
    for found, exact in expected:  # tensor cores sum in 14 bits of mantissa; the result is rounded to bf16
        assert ((found.double() - exact).norm() / exact.norm()).item() < 2.0**-8
