"""Optimizers of the user's: what is examined before a run, what is refused, and the update of those that are used."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from meshwright.base.config import OptimizerConfig, ParameterGroupConfig
from meshwright.base.topology.optimizer_state import state_tensors
from meshwright.core.optim.build import build_optimizer
from meshwright.core.optim.check_user_optimizer import examine_optimizer
from meshwright.core.optim.user_optimizer import import_state
from meshwright.errors import ConfigError

CONFIG = OptimizerConfig(lr=0.01, clip=0.0)


class LARS(torch.optim.SGD):
    """Scales each update by the norm of its parameter."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.detach().norm() / p.grad.norm())
        return super().step()


class GlobalNorm(torch.optim.SGD):
    """Couples all parameters of a rank."""

    def step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        return super().step()


class Counting(torch.optim.Optimizer):
    """Has a number of Python in its state, and another one hidden in the optimizer if asked."""

    def __init__(self, params, lr=1e-3, hidden=False):
        super().__init__(params, {"lr": lr})
        self.hidden, self.steps = hidden, 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.sub_(group["lr"] / (self.steps if self.hidden else state["count"]) * p.grad)


def model():
    torch.manual_seed(0)
    return nn.Linear(4, 3).double()


def steps(optimizer, module, first, last, lr=0.01):
    for step in range(first, last):
        for p in module.parameters():
            p.grad = torch.sin((step + 1) * torch.arange(p.numel(), dtype=p.dtype)).reshape(p.shape)
        optimizer.update(lr / (step + 1), optimizer.gradient_norm(), torch.ones(()), torch.tensor(True))


def make(factory, config=CONFIG, module=None):
    module = module or model()
    facts = examine_optimizer(factory, config)
    config = replace(config, kind="custom", state=facts.state)
    return module, build_optimizer(dict(module.named_parameters()), config, factory=factory)


@pytest.mark.parametrize(
    ("factory", "state"),
    [
        (torch.optim.SGD, ""),
        (torch.optim.RMSprop, "step:scalar square_avg"),
        (lambda groups: torch.optim.Adam(groups, amsgrad=True), "step:scalar exp_avg exp_avg_sq max_exp_avg_sq"),
        (lambda groups: torch.optim.NAdam(groups, foreach=True), "step:scalar mu_product:scalar exp_avg exp_avg_sq"),
        (Counting, "count:number"),
    ],
)
def test_elementwise_optimizer_is_recognized_with_its_state(factory, state):
    facts = examine_optimizer(factory, CONFIG)
    assert (facts.state, facts.not_elementwise) == (state, "")


@pytest.mark.parametrize("factory", [LARS, GlobalNorm, torch.optim.Muon])
def test_optimizer_that_is_not_elementwise_is_recognized(factory):
    def matrices(groups):
        return factory(groups)

    if factory is torch.optim.Muon:  # it refuses vectors itself
        with pytest.raises(ValueError, match="2D"):
            examine_optimizer(matrices, CONFIG)
        return
    assert "has another update" in examine_optimizer(matrices, CONFIG).not_elementwise


def test_state_outside_of_the_optimizer_state_is_refused():
    with pytest.raises(ConfigError, match="takes other steps after a checkpoint"):
        examine_optimizer(lambda groups: Counting(groups, hidden=True), CONFIG)


def test_state_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match="the optimizer state row_var"):
        examine_optimizer(torch.optim.Adafactor, CONFIG)


def test_learning_rate_in_the_factory_is_refused_where_it_differs_from_that_of_the_run():
    with pytest.raises(ConfigError, match=r"has lr = 0\.5, and optimizer.lr of the run is 0\.01"):
        examine_optimizer(lambda groups: torch.optim.SGD(groups, lr=0.5), CONFIG)
    examine_optimizer(lambda groups: torch.optim.SGD(groups, lr=0.01), CONFIG)


class Passing(torch.optim.AdamW):
    def __init__(self, params, **kw):
        super().__init__(params, **kw)


class Eager(torch.optim.AdamW):
    def __init__(self, params, **kw):
        super().__init__(params, lr=0.5, **kw)


def test_class_that_passes_its_keywords_on_is_accepted_unless_it_sets_a_learning_rate():
    assert examine_optimizer(Passing, CONFIG).state == examine_optimizer(torch.optim.AdamW, CONFIG).state
    with pytest.raises(ConfigError, match=r"the optimizer Eager has lr = 0\.5"):
        examine_optimizer(Eager, CONFIG)


def test_factory_that_leaves_parameters_out_is_refused():
    with pytest.raises(ConfigError, match="1 parameters, and 3 were given"):
        examine_optimizer(lambda groups: torch.optim.SGD(groups[0]["params"][:1]), CONFIG)


def test_update_equals_that_of_torch_with_the_rates_of_the_run():
    groups = (ParameterGroupConfig("weight", lr_factor=2.0, weight_decay=0.3),)
    module, optimizer = make(torch.optim.RMSprop, replace(CONFIG, groups=groups))
    steps(optimizer, module, 0, 3)
    expected = model()
    rmsprop = torch.optim.RMSprop(
        [{"params": [expected.weight], "weight_decay": 0.3}, {"params": [expected.bias]}], lr=0.01
    )
    for step in range(3):
        rmsprop.param_groups[0]["lr"], rmsprop.param_groups[1]["lr"] = 0.02 / (step + 1), 0.01 / (step + 1)
        for p in expected.parameters():
            p.grad = torch.sin((step + 1) * torch.arange(p.numel(), dtype=p.dtype)).reshape(p.shape)
        rmsprop.step()
    assert torch.equal(module.weight, expected.weight)
    assert torch.equal(module.bias, expected.bias)


@pytest.mark.parametrize("factory", [torch.optim.RMSprop, Counting])
@pytest.mark.parametrize("saved_after", [0, 2])
def test_checkpoint_continues_with_the_same_bits(factory, saved_after):
    whole, optimizer = make(factory)
    steps(optimizer, whole, 0, 4)
    before, optimizer = make(factory)
    steps(optimizer, before, 0, saved_after)
    saved = {name: shard.local.clone() for name, shard in optimizer.moments().items()}
    after, resumed = make(factory)
    after.load_state_dict(before.state_dict())
    for name, shard in resumed.moments().items():
        shard.local.copy_(saved[name])
    resumed.after_restore(True)
    steps(resumed, after, saved_after, 4)
    assert torch.equal(after.weight, whole.weight)


def test_state_in_memory_has_the_declared_bytes():
    module, optimizer = make(torch.optim.RMSprop)
    steps(optimizer, module, 0, 1)
    config = optimizer.rules[0].config
    declared = sum(
        t.nbytes(tuple(p.shape), 8) for p in module.parameters() for t in state_tensors(config, "custom", p.shape)
    )
    assert sum(tensor.nbytes for tensor in optimizer.state_tensors()) == declared


def test_weight_decay_of_a_group_applies_to_its_own_parameters_alone():
    """A group may set the decay that other parameters have by default, and knows names without the prefix."""
    groups = (ParameterGroupConfig("first", weight_decay=0.1),)
    config = OptimizerConfig(kind="custom", lr=0.01, weight_decay=0.1, groups=groups)
    named = {f"model.{name}": nn.Parameter(torch.ones(2, 2)) for name in ("first", "second")}
    built = build_optimizer(named, config, prefix="model.", factory=partial(torch.optim.SGD, weight_decay=0.7))
    found = {p: group["weight_decay"] for group in built.rules[0].optimizer.param_groups for p in group["params"]}
    assert [found[p] for p in named.values()] == [0.1, 0.7]


@pytest.mark.parametrize(("on_device", "device"), [(True, "meta"), (False, "cpu")])
def test_step_is_on_the_device_of_the_parameter_for_fused_kernels(on_device, device):
    tensors = {"step": torch.ones(()), "scale": torch.ones(())}
    kinds = dict.fromkeys(tensors, "scalar")
    state = import_state(tensors, kinds, torch.device("meta"), on_device)
    assert state["step"].device.type == device
    assert state["scale"].device.type == "meta"
