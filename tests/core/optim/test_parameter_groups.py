"""Parameter groups: the first pattern that matches applies, and a pattern without a parameter is refused."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.base.config import (
    LayoutConfig,
    OptimizerConfig,
    ParameterGroupConfig,
    config_from_dict,
    identity,
)
from meshwright.base.config.reader import config_to_toml
from meshwright.base.models.registry import run_spec
from meshwright.base.topology.optimizer_state import RULES
from meshwright.base.topology.parameter_groups import find_group, validate_groups
from meshwright.base.topology.unsupported import validate
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.errors import ConfigError
from meshwright.planner.cost.peak_memory import state_memory
from tests.kit.small_run import load_cpu_config

GROUPS = (
    ParameterGroupConfig("*.bias", lr_factor=0.5, weight_decay=0.2),
    ParameterGroupConfig("1.*", lr_factor=3.0),
)
TOML = '--optimizer.groups=[{pattern = "*.attention.*", frozen = true}, {pattern = "*norm*", lr_factor = 2}]'


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()


def update_once(config, lr):
    model = two_layers()
    optimizer = build_optimizer(dict(model.named_parameters()), config)
    for parameter in model.parameters():
        parameter.grad = torch.cos(torch.arange(parameter.numel(), dtype=parameter.dtype)).reshape(parameter.shape)
    optimizer.update(lr, optimizer.gradient_norm(), torch.ones(()), torch.tensor(True))
    return dict(model.named_parameters())


@pytest.mark.parametrize("kind", [name for name, rule in RULES.items() if rule.elementwise])
def test_group_updates_as_an_optimizer_with_its_rate_and_decay(kind):
    config = OptimizerConfig(kind=kind, groups=GROUPS)
    found = update_once(config, lr=0.1)
    plain = replace(config, groups=())
    decayed = replace(plain, groups=(ParameterGroupConfig("*", weight_decay=0.2),))
    expected = {
        "0.weight": update_once(plain, lr=0.1),
        "0.bias": update_once(decayed, lr=0.05),
        "1.weight": update_once(plain, lr=0.1 * 3.0),
        "1.bias": update_once(decayed, lr=0.05),  # the first group that matches applies
    }
    for name, parameter in found.items():
        assert torch.allclose(parameter, expected[name][name], rtol=1e-14, atol=0), name


def test_pattern_without_a_parameter_is_refused_with_names_that_are_near():
    names = ["decoder.blocks.0.attention_norm.weight", "decoder.embedding.weight"]
    config = OptimizerConfig(groups=(ParameterGroupConfig("*.embeding.weight"),))
    with pytest.raises(ConfigError, match="matches no parameter") as error:
        validate_groups(config, names)
    assert "decoder.embedding.weight" in error.value.hint


def test_group_that_is_hidden_by_earlier_groups_is_refused():
    config = OptimizerConfig(groups=(ParameterGroupConfig("*"), ParameterGroupConfig("a.*")))
    with pytest.raises(ConfigError, match="only parameters of earlier groups"):
        validate_groups(config, ["a.weight"])


def test_groups_that_freeze_everything_are_refused():
    with pytest.raises(ConfigError, match="freezes every parameter"):
        validate_groups(OptimizerConfig(groups=(ParameterGroupConfig("*", frozen=True),)), ["a", "b"])


@pytest.mark.parametrize("group", [{}, {"pattern": "*", "frozen": True, "lr_factor": 2.0}])
def test_group_without_a_pattern_or_with_a_rate_for_frozen_parameters_is_refused(group):
    with pytest.raises(ConfigError, match="groups"):
        config_from_dict({"optimizer": {"groups": [group]}})


def test_groups_are_identity_and_survive_the_run_file():
    config = load_cpu_config(overrides=[TOML])
    assert config_from_dict(tomllib.loads(config_to_toml(config))) == config
    assert identity(config)["optimizer.groups[0].pattern"] == "*.attention.*"
    assert identity(config)["optimizer.groups[0].frozen"] is True


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state():
    config = load_cpu_config(overrides=[TOML])
    layout, batch = validate(config)
    spec = run_spec(config)
    frozen = {p.name for p in spec.parameters if not p.trainable}
    assert frozen == {p.name for p in spec.parameters if ".attention." in p.name} != set()
    trained = sum(p.local_numel() for p in spec.parameters if p.trainable)
    memory = state_memory(config, layout, batch)
    assert memory.optimizer == 8 * trained + 4 * (len(spec.parameters) - len(frozen))
    assert memory.gradient == 4 * trained


def test_groups_of_a_custom_model_use_its_own_names():
    custom = CustomModel(two_layers(), nn.functional.mse_loss, ParallelSpec())
    config = OptimizerConfig(groups=(ParameterGroupConfig("0.*", frozen=True),))
    objective = custom.with_frozen_groups(config).build_objective(torch.device("cpu"), torch.float32)
    assert [n for n, p in objective.named_parameters() if not p.requires_grad] == ["model.0.weight", "model.0.bias"]
    assert all(parameter.requires_grad for parameter in custom.module.parameters())
    with pytest.raises(ConfigError, match="matches no parameter"):
        custom.with_frozen_groups(OptimizerConfig(groups=(ParameterGroupConfig("model.0.*"),)))
    assert find_group(config, "1.weight") is None


def test_layout_does_not_change_what_is_frozen():
    config = load_cpu_config(overrides=[TOML])
    sharded = replace(config, layout=LayoutConfig(replicate=2, shard="parameters"))
    assert run_spec(config) == run_spec(sharded)
