"""A custom model on the meta device: each rank initializes its shards by the user's init, the same on every layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright import ParallelSpec, train
from meshwright.base.config import LayoutConfig
from meshwright.base.user_code.user_code import UserCode
from meshwright.core.launch.user_code.make_custom_model import make_custom_model
from meshwright.errors import ConfigError
from tests.kit.custom_model import Points, custom_config, summed_cross_entropy


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 3, bias=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x) * self.scale


def meta_tower() -> nn.Module:
    with torch.device("meta"):
        return Tower()


def init(name, tensor):
    if name == "scale":
        tensor.fill_(2.0)
    else:
        nn.init.normal_(tensor, std=0.5)


def custom(function=init):
    return make_custom_model(UserCode(meta_tower(), summed_cross_entropy, init=function))


def test_initial_values_depend_on_seed_and_name_alone():
    one, other = custom().with_values(0).module.state_dict(), custom().with_values(0).module.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["blocks.0.weight"], one["blocks.1.weight"])
    assert not torch.equal(one["head.weight"], custom().with_values(1).module.state_dict()["head.weight"])
    assert one["scale"].item() == 2.0


def test_tensor_that_init_forgets_is_named():
    with pytest.raises(ConfigError, match=r"init wrote no values, or NaN, to blocks\.0\.bias"):
        custom(lambda name, tensor: None if name.endswith("bias") else tensor.zero_()).with_values(0)


def test_model_on_the_meta_device_needs_init(tmp_path):
    with pytest.raises(ConfigError, match=r"the model is on the meta device .*, and has no init; expected init="):
        train(custom_config(), model=meta_tower, loss=summed_cross_entropy, source=Points(), run=tmp_path, quiet=True)


def test_run_of_a_model_on_the_meta_device_equals_that_of_its_values_on_every_layout(tmp_path):
    def run(name, model, layout, **options):
        config = custom_config(2, layout=layout)
        spec = ParallelSpec(blocks="blocks.*", after=("head",))
        data = {"loss": summed_cross_entropy, "source": Points(), "parallel_spec": spec}
        return train(config, model=model, run=tmp_path / name, quiet=True, **data, **options)

    replicated, sharded = LayoutConfig(replicate=2), LayoutConfig(replicate=1, shard="parameters", shard_degree=2)
    values = run("values", custom().with_values(0).module, replicated)
    assert run("ddp", meta_tower(), replicated, init=init).digest == values.digest
    result = run("fsdp", meta_tower, sharded, init=init)
    assert result.loss == pytest.approx(values.loss, rel=1e-5)
    assert all(parameter.is_meta for parameter in result.model.parameters())
    assert result.folder == tmp_path / "fsdp"
