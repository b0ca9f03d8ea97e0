"""Adafactor equals torch.optim.Adafactor, and treats every expert's matrix by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.base.config import OptimizerConfig
from meshwright.core.optim.adafactor import Adafactor
from meshwright.core.optim.build import build_optimizer

SHAPES = {"matrix": (6, 4), "vector": (5,), "scalar": (), "convolution": (2, 3, 4, 5)}
CONFIG = OptimizerConfig(kind="adafactor", clip=0.0, weight_decay=0.1)


def draw(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def train(values, gradients, lr: float, config: OptimizerConfig = CONFIG) -> dict[str, torch.Tensor]:
    parameters = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    optimizer = build_optimizer(parameters, config)
    one = torch.ones((), dtype=torch.float64)
    for step_gradients in gradients:
        for name, parameter in parameters.items():
            parameter.grad = step_gradients[name].clone()
        optimizer.update(lr, one, one, torch.tensor(True))
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
@pytest.mark.parametrize("lr", [1e-2, 3.0])
def test_adafactor_equals_torch(size, lr):
    values = draw(SHAPES, 0)
    gradients = [{name: size * g for name, g in draw(SHAPES, seed).items()} for seed in range(1, 5)]
    found = train(values, gradients, lr)
    for name, value in values.items():
        parameter = nn.Parameter(value.clone())
        decay = 0.1 if value.ndim >= 2 else 0.0
        expected = torch.optim.Adafactor([parameter], lr=lr, weight_decay=decay)
        for step_gradients in gradients:
            parameter.grad = step_gradients[name]
            expected.step()
        assert torch.allclose(found[name], parameter.detach(), rtol=1e-12, atol=1e-14), name


def test_every_matrix_of_a_stack_is_updated_by_itself():
    stack = draw({"bank": (3, 6, 4)}, 0)
    gradients = [draw({"bank": (3, 6, 4)}, seed) for seed in range(1, 4)]
    together = train(stack, gradients, 0.1)["bank"]
    for expert in range(3):
        alone = train({"bank": stack["bank"][expert]}, [{"bank": g["bank"][expert]} for g in gradients], 0.1)
        assert torch.allclose(together[expert], alone["bank"], rtol=1e-12)


def test_parameter_without_a_gradient_takes_part_in_the_sums_and_does_not_change(monkeypatch):
    sizes, right = [], Adafactor._sum_over_ranks
    monkeypatch.setattr(
        Adafactor,
        "_sum_over_ranks",
        lambda self, parts: sizes.append([part.shape for part in parts]) or right(self, parts),
    )
    one = torch.ones((), dtype=torch.float64)
    for unused in ((), SHAPES):
        parameters = {name: nn.Parameter(value) for name, value in draw(SHAPES, 0).items()}
        optimizer = build_optimizer(parameters, CONFIG)
        for name, gradient in draw(SHAPES, 1).items():
            parameters[name].grad = None if name in unused else gradient
        optimizer.update(0.01, one, one, torch.tensor(True))
    assert sizes[2:] == sizes[:2]
    for name, value in draw(SHAPES, 0).items():
        assert torch.equal(parameters[name], value), name
    assert not any(shard.local.any() for shard in optimizer.moments().values())
