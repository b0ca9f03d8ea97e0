"""Weights in bf16: they are the rounding of float32 master weights, and the residual stream is bf16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from meshwright.base.config import DDPConfig, OptimizerConfig
from meshwright.base.models.registry import run_spec
from meshwright.base.topology.layout import Layout
from meshwright.core.optim.build import build_optimizer
from meshwright.core.parallel.data_parallel.ddp import DDPModel, ReplicatedModel, bucket_message
from meshwright.core.parallel.local_shard import local_tensor
from meshwright.core.parallel.materialize import Materializer
from meshwright.core.parallel.parallel_model import ParallelModel, PassHooks
from meshwright.core.parallel.parallel_spec import find_blocks
from meshwright.core.parallel.tensor_parallel import family_parallel_spec
from meshwright.core.parallel.world import World
from meshwright.core.trainer.build import build_parallel_model
from meshwright.core.trainer.precision import Precision
from meshwright.testing import run_ranks
from tests.kit.small_run import load_cpu_config

SMALL = ["--model.width=32", "--model.layers=2", "--model.ffn=48", "--model.heads=4", "--model.kv_heads=4"]
BF16 = ["--precision.compute=bf16", "--precision.weights=bf16"]
FAMILIES = {
    "llama": [],
    "gpt2": ["--model.family=gpt2", "--model.tie=true"],
    "gemma2": ["--model.family=gemma2", "--model.tie=true"],
    "qwen3": ["--model.family=qwen3"],
    "mixtral": ["--model.family=mixtral", "--model.experts=4"],
}


def build(*overrides: str) -> tuple[ParallelModel, list[torch.nn.Module]]:
    config = load_cpu_config(overrides=[*SMALL, *overrides])
    world = World()
    model = build_parallel_model(config, Layout(), None, Precision(config.precision, world.device), world)
    return model, find_blocks(model.module, family_parallel_spec(run_spec(config)))


@pytest.mark.parametrize("family", FAMILIES)
def test_masters_are_the_initial_values_of_float32_weights_and_the_weights_are_their_rounding(family):
    rounded, _ = build(*BF16, *FAMILIES[family])
    exact, _ = build(*FAMILIES[family])
    masters, weights, expected = rounded.master_parameters(), rounded.parameters(), exact.parameters()
    assert list(masters) == list(weights) == list(expected)
    for name, master in masters.items():
        assert torch.equal(master, expected[name]), name
        assert weights[name].dtype == torch.bfloat16
        assert torch.equal(weights[name], expected[name].bfloat16()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_residual_stream_of_bf16_weights_is_bf16_in_every_block_and_in_the_head(family):
    model, blocks = build(*BF16, *FAMILIES[family])
    seen = []
    for module in (*blocks, model.module.head):
        module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].dtype))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model(tokens, tokens)
    loss.backward()
    assert seen == [torch.bfloat16] * (len(blocks) + 1)
    assert loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters().values()} == {torch.bfloat16}


def test_norms_and_experts_return_the_dtype_of_a_float32_residual_stream():
    model, blocks = build(*BF16, "--precision.residual=fp32", *FAMILIES["mixtral"])
    seen = []
    for module in (*blocks, model.module.head):
        module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].dtype))
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, tokens)
    assert set(seen) == {torch.float32}


def test_parameter_that_a_module_refers_to_elsewhere_is_trained():
    module = ScaledTwice()
    masters = Materializer(module, None, torch.device("cpu"), torch.bfloat16)
    masters.initialize(module)
    module(torch.ones(2, dtype=torch.bfloat16)).sum().backward()
    assert module.scale.dtype == torch.bfloat16
    assert torch.equal(module.scale.grad, torch.full((2,), 2.5, dtype=torch.bfloat16))
    assert masters.masters[module.scale].dtype == torch.float32


class ScaledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 1.25))
        self.scales = [self.scale]

    def forward(self, x):
        return x * self.scale * self.scales[0]


def test_loaded_masters_are_rounded_into_the_model():
    model, _ = build(*BF16)
    with torch.no_grad():
        for master in model.master_parameters().values():
            master.mul_(1.7)
    model.round_masters()
    weights = model.parameters()
    assert all(torch.equal(weights[name], m.bfloat16()) for name, m in model.master_parameters().items())


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd", "lion", "adafactor"])
def test_every_update_rule_updates_the_masters_as_it_updates_float32_weights_and_rounds_them(kind):
    values = []
    for options in ([], BF16):
        model, _ = build(*options)
        config = OptimizerConfig(kind=kind)
        named = model.parameters()
        optimizer = build_optimizer(named, config, blocks=model.block_patterns, masters=model.masters)
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            for parameter in named.values():
                gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
                parameter.grad = gradient.to(parameter.dtype)
            optimizer.update(1e-2, optimizer.gradient_norm(), torch.ones(()), torch.tensor(True))
            optimizer.zero_grad()
        masters = model.master_parameters()
        assert all(torch.equal(p, masters[name].to(p.dtype)) for name, p in named.items())
        values.append(masters)
    for name, exact in values[0].items():
        torch.testing.assert_close(values[1][name], exact.detach(), rtol=1e-5, atol=1e-6)


def run_steps(world: World, layout: Layout, options: list[str], micro_batches: int) -> tuple[list[float], set, float]:
    """(gradient norms of two steps, dtypes of gradients, largest distance of a weight from its master's rounding)."""
    config = load_cpu_config(overrides=[*SMALL, *options])
    precision = Precision(config.precision, world.device)
    model = build_parallel_model(config, layout, None, precision, world)
    optimizer = build_optimizer(model.parameters(), config.optimizer, layout, world, masters=model.masters)
    generator, norms, dtypes = torch.Generator().manual_seed(7), [], set()
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with torch.no_grad(), precision.autocast(), model.micro_step(last=True):  # a pass outside of a step changes nothing
        model.forward_loss(tokens, tokens)
    model.reshard()
    for _ in range(2):
        batches = [torch.randint(0, 200, (4, 8), generator=generator) for _ in range(micro_batches)]
        local = [t.chunk(layout.data_degree)[layout.data_coordinate(world.rank)] for t in batches]
        hooks = PassHooks(lambda _phase: None, precision.autocast, lambda loss: loss / 64, lambda: None)
        model.forward_backward([(tokens, tokens) for tokens in local], hooks)
        dtypes |= {gradient.dtype for gradient in model.gradients().values()}
        norms.append(float(optimizer.gradient_norm()))
        optimizer.update(1e-3, torch.tensor(norms[-1]), torch.ones(()), torch.tensor(True))
        optimizer.zero_grad()
    weights = model.parameters()
    distances = [
        (local_tensor(weights[name]) - local_tensor(master).bfloat16()).abs().max()
        for name, master in model.master_parameters().items()
        if local_tensor(master).numel()
    ]
    return norms, dtypes, float(max(distances))


LAYOUTS = {
    "DDP": Layout(replicate=2),
    "FSDP2": Layout(shard=2),
    "tensor": Layout(tensor=2),
}


def masters_of_replicas(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """The master weight and the weight of a replica whose module begins with values of its own on every rank."""
    module = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(module.weight, world.rank + 1.001)
    materializer = Materializer(module, None, world.device, torch.bfloat16)
    materializer.initialize(module)
    model = DDPModel(module, DDPConfig(), world)
    model.masters = materializer.masters
    model.broadcast_masters()
    return model.masters[module.weight], module.weight.detach()


def run_layouts(world: World) -> dict:
    steps = {
        (name, micro): run_steps(world, layout, BF16, micro) for name, layout in LAYOUTS.items() for micro in (1, 2)
    }
    return steps | {"masters": masters_of_replicas(world)}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    return run_ranks(run_layouts, 2)


def test_replicas_begin_with_the_master_weights_of_the_first_rank(two_ranks):
    for result in two_ranks:
        master, weight = result["masters"]
        assert torch.equal(master, torch.full((2, 2), 1.001))
        assert torch.equal(weight, master.bfloat16())


def test_gradients_beside_buckets_are_added_in_the_strides_of_their_weight():
    weight = torch.nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    flat, kept = torch.zeros(24, dtype=torch.bfloat16), torch.arange(24.0).view(2, 3, 2, 2)
    state = ReplicatedModel(torch.nn.Identity(), DDPConfig(), World())
    state.accumulated = {weight: kept.to(memory_format=torch.channels_last)}
    view = flat.as_strided(weight.shape, weight.stride())
    bucket = SimpleNamespace(
        index=lambda: 0,
        buffer=lambda: flat,
        gradients=lambda: [view],
        parameters=lambda: [weight],
        is_last=lambda: False,
    )
    message = bucket_message(state, bucket)
    assert torch.equal(message.as_strided(view.shape, view.stride()), kept)


def test_gradients_are_summed_over_ranks_and_accumulated_in_float32(two_ranks):
    """DDP rounds the sum once, to its buckets; without DDP, a gradient that is summed or accumulated stays float32."""
    found = two_ranks[0]
    for micro in (1, 2):
        expected, dtypes, _ = run_steps(World(), Layout(), [], micro)
        assert dtypes == {torch.float32}
        for name in LAYOUTS:
            norms, dtypes, distance = found[name, micro]
            assert norms == pytest.approx(expected, rel=2e-3), name
            is_float32 = name == "FSDP2" or (name == "tensor" and micro == 2)
            assert dtypes == {torch.float32 if is_float32 else torch.bfloat16}, (name, micro)
            assert distance == 0, name
