"""Float8 in a parallelized model: which layers, on shards of tensor and data parallelism, under activation
checkpointing, and what is unsupported."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.base.config import load_config
from meshwright.base.topology.unsupported import validate
from meshwright.core.kernels import float8 as kernels
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.float8 import Float8Linear, apply_float8, float8_layers, require_float8
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.parallel.world import World
from meshwright.errors import ConfigError
from tests.kit.step_harness import LR, build_loader, build_step

MODEL = ["--model.layers=2", "--model.width=32", "--model.heads=4", "--model.kv_heads=4", "--model.ffn=64"]
MODEL += ["--model.vocab=26", "--data.sequence=16", "--batch.global=4", "--batch.micro=2", "--precision.compute=bf16"]
FLOAT8 = [*MODEL, "--precision.float8=true"]
ALONE = ["--layout.replicate=1"]
LAYOUTS = {
    "replicate": ["--layout.replicate=2"],
    "shard": ["--layout.replicate=2", "--layout.shard=parameters"],
    "tensor": ["--layout.replicate=1", "--layout.tensor=2"],
}
ATTENTION = [f"decoder.blocks.*.attention.{name}" for name in ("q", "k", "v", "out")]
FFN = [f"decoder.blocks.*.ffn.{name}" for name in ("gate", "up", "down")]
TOLERANCE = 2e-3
"""Shards have scales of their own, so that values are rounded differently, each by at most 2^-4; the mean loss of 64
tokens differs by far less. A step changes it by 7e-2."""


def train(world, overrides):
    """Returns the losses of three steps, the layers in float8, and the dtypes of the parameters."""
    config = load_config(overrides=overrides)
    step = build_step(world, config, validate(config)[0])
    batches = build_loader(world, config).steps(0, 3)
    losses = [float(step.run(number, LR, batches).numbers[0]) for number in range(3)]
    dtypes = {parameter.dtype for parameter in step.parallel_model.module.parameters()}
    return losses, float8_layers(step.parallel_model.module), dtypes


@pytest.fixture(scope="module")
def single_process_losses():
    losses, layers, dtypes = train(World(), [*FLOAT8, *ALONE])
    assert layers == [*ATTENTION, *FFN]
    assert dtypes == {torch.float32}
    return losses


def test_float8_follows_bf16(single_process_losses):
    losses, layers, _ = train(World(), [*MODEL, *ALONE])
    assert layers == []
    assert losses != single_process_losses
    assert losses == pytest.approx(single_process_losses, abs=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_have_scales_of_their_own(layout, single_process_losses):
    for losses, layers, _ in run_ranks(train, 2, [*FLOAT8, *LAYOUTS[layout]]):
        assert layers == [*ATTENTION, *FFN]
        assert losses == pytest.approx(single_process_losses, abs=TOLERANCE)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_changes_no_bit(mode, single_process_losses):
    losses, _, _ = train(World(), [*FLOAT8, *ALONE, f"--activation_checkpoint.mode={mode}"])
    assert losses == single_process_losses


@pytest.mark.parametrize(("degree", "layers"), [(1, ["layers.*.in", "layers.*.out"]), (2, ["layers.*.out"])])
def test_layers_whose_shards_are_no_multiples_of_16_stay_in_bf16(degree, layers):
    sizes = {"in": (32, 48), "out": (64, 32), "odd": (32, 20)}
    block = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    model = nn.ModuleDict({"layers": nn.ModuleList([block])})
    apply_float8(model, ParallelSpec(blocks="layers.*"), degree)
    assert float8_layers(model) == layers


def test_routers_factors_and_layers_outside_of_blocks_stay_in_bf16():
    class Subclass(nn.Linear):
        pass

    mixture = nn.ModuleDict({"gate": nn.Linear(32, 16), "experts": nn.ModuleDict({"up": nn.Linear(32, 32)})})
    block = nn.ModuleDict({"mlp": mixture, "lora": Subclass(32, 32), "out": nn.Linear(32, 32)})
    model = nn.ModuleDict({"layers": nn.ModuleList([block]), "head": nn.Linear(32, 32)})
    names = list(model.state_dict())
    apply_float8(model, ParallelSpec(blocks="layers.*", experts="layers.*.mlp.experts"), tensor_degree=1)
    assert "layers.*.mlp.gate" not in float8_layers(model)
    assert "layers.*.out" in float8_layers(model)
    assert not isinstance(block["lora"], Float8Linear)
    assert type(model["head"]) is nn.Linear
    assert list(model.state_dict()) == names


def test_bias_is_added_in_the_precision_of_the_product():
    layer = nn.Sequential(nn.Linear(32, 16))
    apply_float8(layer, ParallelSpec(blocks="0"), tensor_degree=1)
    x = torch.randn(16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    expected = kernels.float8_linear(x.bfloat16(), layer[0].weight.bfloat16()) + layer[0].bias.bfloat16()
    assert torch.equal(found, expected)


def test_float8_needs_bf16_and_a_gpu_that_has_it(monkeypatch):
    with pytest.raises(ConfigError, match=r"precision\.float8 without precision\.compute = bf16") as error:
        validate(load_config(overrides=[*FLOAT8, "--precision.compute=fp32"]))
    assert error.value.hint.startswith("try precision.compute = bf16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    with pytest.raises(ConfigError, match=r"8\.9 or newer, and cuda:0 has 8\.0"):
        require_float8(torch.device("cuda:0"))
    require_float8(torch.device("cpu"))
