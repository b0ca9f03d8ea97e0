"""Muon orthogonalizes the momentum of matrices, as torch.optim.Muon does; AdamW updates everything else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.base.config import OptimizerConfig
from meshwright.core.optim.build import build_optimizer
from meshwright.core.optim.matrix_exchange import MatrixExchange
from meshwright.core.optim.muon import orthogonalize

SHAPES = {
    "embedding.weight": (9, 4),
    "blocks.0.wide": (4, 6),
    "blocks.0.tall": (8, 4),
    "blocks.0.norm": (4,),
    "blocks.0.bank": (3, 5, 4),
    "head.weight": (9, 4),
}
RULES = {"blocks.0.wide": "muon", "blocks.0.tall": "muon", "blocks.0.bank": "muon"}


def draw(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


def train(config: OptimizerConfig, steps: int = 3, lr: float = 0.02, dtype: torch.dtype = torch.float64):
    parameters = {name: nn.Parameter(value) for name, value in draw(0, dtype).items()}
    optimizer = build_optimizer(parameters, config, blocks=("blocks.*",))
    one = torch.ones((), dtype=dtype)
    for step in range(steps):
        for name, gradient in draw(step + 1, dtype).items():
            parameters[name].grad = gradient
        optimizer.update(lr, one, one, torch.tensor(True))
    return parameters, optimizer


def test_muon_updates_the_matrices_of_blocks_and_adamw_the_rest():
    _, optimizer = train(OptimizerConfig(kind="muon"), steps=1)
    assert {p.name: p.settings.rule for p in optimizer.optimized} == dict.fromkeys(SHAPES, "adamw") | RULES
    keys = {name.rpartition("/")[2] for name in optimizer.moments() if name.startswith("blocks.0.bank/")}
    assert keys == {"momentum"}


def test_parameters_outside_of_blocks_and_vectors_are_those_of_adamw():
    found, _ = train(OptimizerConfig(kind="muon", clip=0.0))
    expected, _ = train(OptimizerConfig(clip=0.0))
    for name in SHAPES.keys() - RULES.keys():
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["match-rms-adamw", "original"])
def test_muon_equals_torch_but_for_the_bfloat16_of_its_iterations(nesterov, scale, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    config = OptimizerConfig(kind="muon", clip=0.0, nesterov=nesterov, update_scale=scale, weight_decay=0.3)
    found, _ = train(config)
    start = draw(0)
    for name in ("blocks.0.wide", "blocks.0.tall"):
        parameter = nn.Parameter(start[name])
        adjust = scale.replace("-", "_")
        expected = torch.optim.Muon([parameter], lr=0.02, weight_decay=0.3, nesterov=nesterov, adjust_lr_fn=adjust)
        for step in range(3):
            parameter.grad = draw(step + 1)[name]
            expected.step()
        assert torch.allclose(found[name], parameter, rtol=1e-12, atol=1e-13), name


def test_every_expert_is_a_matrix_of_its_own():
    config = OptimizerConfig(kind="muon", clip=0.0)
    found, _ = train(config, steps=1)
    gradient, start = draw(1)["blocks.0.bank"], draw(0)["blocks.0.bank"]
    for expert in range(3):
        direction = orthogonalize(gradient[expert][None], 5)[0]
        right = start[expert] * (1 - 0.02 * config.weight_decay) - 0.02 * 0.2 * 5**0.5 * direction
        assert torch.allclose(found["blocks.0.bank"][expert], right, rtol=1e-12)


def test_orthogonalized_matrices_have_singular_values_near_one():
    matrices = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalize(matrices, 5))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    tall = orthogonalize(matrices.mT, 5)
    assert torch.allclose(tall, orthogonalize(matrices, 5).mT, rtol=1e-12)


def test_gradient_of_zeros_gives_no_direction():
    assert not orthogonalize(torch.zeros(1, 3, 4), 5).any()


def test_step_that_is_not_finite_changes_neither_parameters_nor_momentum():
    parameters, optimizer = train(OptimizerConfig(kind="muon"), steps=1)
    before = {name: value.detach().clone() for name, value in parameters.items()}
    moments = {name: shard.local.clone() for name, shard in optimizer.moments().items()}
    for name, gradient in draw(5).items():
        parameters[name].grad = gradient * float("nan")
    nan = torch.tensor(float("nan"), dtype=torch.float64)
    optimizer.update(0.1, nan, torch.ones_like(nan), torch.tensor(False))
    assert all(torch.equal(value, before[name]) for name, value in parameters.items())
    assert all(torch.equal(shard.local, moments[name]) for name, shard in optimizer.moments().items())


def test_matrix_without_a_gradient_takes_part_in_the_exchange_and_does_not_change(monkeypatch):
    exchanged, right = [], MatrixExchange.map_matrices
    monkeypatch.setattr(
        MatrixExchange,
        "map_matrices",
        lambda self, tensors, function: exchanged.append(set(tensors)) or right(self, tensors, function),
    )
    parameters = {name: nn.Parameter(value) for name, value in draw(0).items()}
    optimizer = build_optimizer(parameters, OptimizerConfig(kind="muon"), blocks=("blocks.*",))
    one = torch.ones((), dtype=torch.float64)
    for name, gradient in draw(1).items():
        parameters[name].grad = None if name == "blocks.0.tall" else gradient
    optimizer.update(0.02, one, one, torch.tensor(True))
    assert exchanged == [set(RULES)]
    assert torch.equal(parameters["blocks.0.tall"], draw(0)["blocks.0.tall"])
    assert not optimizer.moments()["blocks.0.tall/momentum"].local.any()
    assert not torch.equal(parameters["blocks.0.wide"], draw(0)["blocks.0.wide"])
