"""Weights in bf16: they are the rounding of float32 master weights, and the residual stream is bf16."""

from __future__ import annotations

import pytest
import torch
from small_run import load_cpu_config

from meshwright.models.registry import run_spec
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.parallel.parallel_spec import find_blocks
from meshwright.parallel.tensor_parallel import family_parallel_spec
from meshwright.parallel.world import World
from meshwright.topology.layout import Layout
from meshwright.trainer.build import build_parallel_model
from meshwright.trainer.precision import Precision

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
