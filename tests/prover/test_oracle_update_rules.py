"""The oracle's update rules equal torch's optimizers where torch has them, and those of the package."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.base.config import OptimizerConfig, ParameterGroupConfig
from meshwright.core.optim.build import build_optimizer
from meshwright.prover.oracle.update_rules import ReferenceOptimizer, polar_factor

SHAPES = {"b.0.matrix": (6, 4), "b.0.wide": (3, 7), "b.0.bank": (2, 5, 3), "b.0.norm": (4,), "embedding": (8, 4)}
BLOCKS = ("b.*",)
GROUPS = (
    ParameterGroupConfig(pattern="*.norm", lr_factor=0.5, weight_decay=0.7),
    ParameterGroupConfig(pattern="b.0.*", lr_factor=3.0),
    ParameterGroupConfig(pattern="*", weight_decay=0.0),
)


def draw(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def reference(config: OptimizerConfig, steps: int = 4, lr: float = 0.02) -> dict[str, torch.Tensor]:
    optimizer, values = ReferenceOptimizer(config, BLOCKS), draw(0)
    states = {name: {} for name in values}
    for step in range(steps):
        for name, gradient in draw(step + 1).items():
            values[name], states[name] = optimizer.update(name, values[name], gradient, states[name], lr)
    return values | {f"{name}/{key}": value for name, state in states.items() for key, value in state.items()}


@pytest.mark.parametrize(
    ("config", "make"),
    [
        (
            OptimizerConfig(weight_decay=0.3, eps=1e-3),
            lambda p, d: torch.optim.AdamW([p], lr=0.02, betas=(0.9, 0.95), eps=1e-3, weight_decay=d),
        ),
        (
            OptimizerConfig(kind="adafactor", weight_decay=0.3),
            lambda p, d: torch.optim.Adafactor([p], lr=0.02, weight_decay=d),
        ),
    ],
    ids=["adamw", "adafactor"],
)
def test_definition_equals_torch(config, make):
    values = reference(config)
    for name in ("b.0.matrix", "b.0.norm"):
        parameter = nn.Parameter(draw(0)[name])
        optimizer = make(parameter, 0.3 if parameter.ndim == 2 else 0.0)
        for step in range(4):
            parameter.grad = draw(step + 1)[name]
            optimizer.step()
        assert (values[name] - parameter.detach()).abs().max() < 1e-13


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "adamw"},
        {"kind": "muon"},
        {"kind": "muon", "nesterov": False, "update_scale": "original", "newton_schulz_steps": 3},
        {"kind": "adafactor"},
        {"kind": "sgd"},
        {"kind": "sgd", "nesterov": False},
        {"kind": "sgd", "momentum": 0.0, "nesterov": False},
        {"kind": "lion"},
        {"kind": "muon", "groups": GROUPS},
        {"kind": "adamw", "groups": GROUPS},
    ],
    ids=str,
)
def test_definition_equals_the_update_rule_and_its_state(keys):
    config = OptimizerConfig(**keys, clip=0.0, weight_decay=0.2)
    parameters = {name: nn.Parameter(value) for name, value in draw(0).items()}
    optimizer = build_optimizer(parameters, config, blocks=BLOCKS)
    one = torch.ones((), dtype=torch.float64)
    for step in range(4):
        for name, gradient in draw(step + 1).items():
            parameters[name].grad = gradient
        optimizer.update(0.02, one, one, torch.tensor(True))
    found = parameters | {name: shard.local for name, shard in optimizer.moments().items()}
    expected = reference(config)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value.double(), rtol=1e-11, atol=1e-13), name


def test_polar_factor_of_an_orthogonal_matrix_maps_its_singular_values_by_the_polynomial():
    q, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    s = 0.5
    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert torch.allclose(polar_factor(q, 1), s * q, rtol=1e-12)
