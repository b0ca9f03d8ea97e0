"""Linear layers of the same input as one matrix product."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.core.models.layers import projections
from meshwright.core.models.layers.projections import project


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_equals_the_layers_one_by_one(bias, monkeypatch):
    layers = tuple(nn.Linear(8, out, bias=bias, dtype=torch.float64) for out in (8, 4, 4))
    parameters = [p for layer in layers for p in layer.parameters()]
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    separate = torch.cat([layer(x) for layer in layers], dim=-1)
    expected = torch.autograd.grad(separate.square().sum(), [x, *parameters])
    products = count_products(monkeypatch)
    together = torch.cat(project(OnCuda(x), layers), dim=-1)
    assert len(products) == 1
    torch.testing.assert_close(together, separate, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(torch.autograd.grad(together.square().sum(), [x, *parameters]), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("change", ["forward", "hook", "subclass", "one bias"])
def test_layers_that_are_not_plain_are_called(change):
    layers = [nn.Linear(8, 4) for _ in range(3)]
    if change == "forward":
        layers[1].forward = lambda x: 2 * x[..., :4]
    elif change == "hook":
        layers[1].register_forward_hook(lambda _module, _inputs, output: 2 * output)
    elif change == "subclass":
        layers[1].__class__ = type("Scaled", (nn.Linear,), {"forward": lambda self, x: 2 * x[..., :4]})
    else:
        layers[1].bias = None
    x = torch.randn(2, 8)
    expected = [layer(x) for layer in layers]
    for found, wanted in zip(project(OnCuda(x), tuple(layers)), expected, strict=True):
        assert torch.equal(found, wanted)


class OnCuda(torch.Tensor):
    """A tensor that says it is on CUDA."""

    @staticmethod
    def __new__(cls, tensor):
        return tensor.as_subclass(cls)

    is_cuda = True


def count_products(monkeypatch):
    calls, linear = [], nn.functional.linear

    def counted(*args):
        calls.append(args)
        return linear(*args)

    monkeypatch.setattr(projections, "F", SimpleNamespace(linear=counted))
    return calls
