"""Each update rule follows its formula, has the state that it declares, and changes nothing in a skipped step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology import optimizer_state
from meshwright.base.topology.optimizer_state import state_tensors
from meshwright.core.optim.build import RULES, build_optimizer

LR = 0.1
CONFIGS = {
    "adamw": OptimizerConfig(),
    "adamw foreach": OptimizerConfig(implementation="foreach"),
    "sgd": OptimizerConfig(kind="sgd", nesterov=False),
    "sgd foreach nesterov": OptimizerConfig(kind="sgd", implementation="foreach"),
    "sgd without momentum": OptimizerConfig(kind="sgd", momentum=0.0),
    "lion": OptimizerConfig(kind="lion", beta2=0.99),
}


def model():
    torch.manual_seed(0)
    return nn.Linear(5, 3).double()


def gradient(parameter, step):
    return torch.sin(torch.arange(parameter.numel(), dtype=parameter.dtype) * (step + 1)).reshape(parameter.shape)


def train(config, steps=4, scale=1.0, finite=lambda step: True):
    """A model after some updates, the optimizer, and the state by name."""
    module = model()
    optimizer = build_optimizer(dict(module.named_parameters()), config)
    for step in range(steps):
        for parameter in module.parameters():
            parameter.grad = scale * gradient(parameter, step)
        norm = optimizer.gradient_norm() / scale
        optimizer.update(LR, norm, torch.tensor(scale), torch.tensor(finite(step)))
        optimizer.zero_grad()
    return module, optimizer


def reference(config, steps=4):
    """The same updates by the formulas, one parameter after the other, with the gradient clipped by its global norm."""
    module = model()
    state = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    with torch.no_grad():
        for step in range(steps):
            gradients = {name: gradient(p, step) for name, p in module.named_parameters()}
            norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
            for name, p in module.named_parameters():
                g = gradients[name] / max(1.0, float(norm) / config.clip)
                decay = config.weight_decay if p.ndim > 1 else 0.0
                if config.kind == "sgd":
                    g = g + decay * p
                    state[name] = config.momentum * state[name] + g
                    p -= LR * (g + config.momentum * state[name] if config.nesterov else state[name])
                else:
                    update = (config.beta1 * state[name] + (1 - config.beta1) * g).sign()
                    p.mul_(1 - LR * decay).sub_(LR * update)
                    state[name] = config.beta2 * state[name] + (1 - config.beta2) * g
    return module


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("adamw")])
def test_update_follows_the_formula(name, scale):
    module, _ = train(CONFIGS[name], scale=scale)
    expected = reference(CONFIGS[name])
    for found, wanted in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CONFIGS)
def test_skipped_step_changes_neither_parameters_nor_state(name):
    skipped, with_gap = train(CONFIGS[name], steps=3, finite=lambda step: step < 2)
    whole, without = train(CONFIGS[name], steps=2)
    assert all(torch.equal(a, b) for a, b in zip(skipped.parameters(), whole.parameters(), strict=True))
    for key, shard in with_gap.moments().items():
        assert torch.equal(shard.local, without.moments()[key].local), key


@pytest.mark.parametrize("name", CONFIGS)
def test_offloaded_update_equals_that_on_the_device(name):
    on_device, _ = train(CONFIGS[name])
    offloaded, _ = train(replace(CONFIGS[name], cpu_offload=True))
    assert all(torch.equal(a, b) for a, b in zip(on_device.parameters(), offloaded.parameters(), strict=True))


@pytest.mark.parametrize("name", CONFIGS)
def test_state_has_the_declared_keys_shapes_and_bytes(name):
    config = CONFIGS[name]
    module, optimizer = train(config)
    found = {key: shard.local for key, shard in optimizer.moments().items()}
    expected = {}
    for parameter_name, parameter in module.named_parameters():
        for tensor in state_tensors(config, config.kind, tuple(parameter.shape)):
            local = found[f"{parameter_name}/{tensor.key}"]
            assert tuple(local.shape) == tuple(parameter.shape[dim] for dim in tensor.dims)
            expected[f"{parameter_name}/{tensor.key}"] = tensor.nbytes(tuple(parameter.shape), parameter.element_size())
    assert {key: tensor.nbytes for key, tensor in found.items()} == expected


def test_every_rule_is_declared():
    assert RULES.keys() == optimizer_state.RULES.keys()
