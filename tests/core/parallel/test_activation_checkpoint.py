"""Activation checkpointing: it changes no bit, and saves the counted bytes of activations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

import pytest
import torch
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy

from meshwright.base.config import ModelConfig, RunConfig
from meshwright.base.topology.unsupported import validate
from meshwright.core.models.init import build_model
from meshwright.core.parallel.activation_memory.activation_checkpoint import (
    ATTENTION,
    MATMULS,
    SelectivePolicy,
    checkpoint_block,
)
from meshwright.core.parallel.compile import apply_compile
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.parallel.world import World
from meshwright.core.trainer.records.step_counters import count_step
from tests.kit.small_run import load_cpu_config
from tests.kit.step_harness import LR, build_loader, build_step

LAYERS = 36
SHAPE = ["--model.width=32", "--model.ffn=8", "--model.heads=1", "--model.kv_heads=1", f"--model.layers={LAYERS}"]
SHAPE += ["--model.vocab=16", "--data.sequence=16", "--batch.global=4"]
INPUT_BYTES = 4 * 16 * 32 * 4
"""bytes of the input of a block"""
SEGMENTS = (1, 2, 4, 12)
MODES = {
    "none": [],
    "offload": ["--activation_checkpoint.mode=full", "--activation_checkpoint.offload=true"],
    "offload 2": [
        "--activation_checkpoint.mode=full",
        "--activation_checkpoint.segment=2",
        "--activation_checkpoint.offload=true",
    ],
    "selective": ["--activation_checkpoint.mode=selective"],
    **{size: ["--activation_checkpoint.mode=full", f"--activation_checkpoint.segment={size}"] for size in SEGMENTS},
}


@dataclass(frozen=True)
class Measured:
    saved: int
    """bytes of activations at the start of backward"""
    recomputed: int
    """peak bytes that backward recomputes, with its temporaries"""
    weights: torch.Tensor


def measure_step(config: RunConfig) -> Measured:
    """Measures the second of two steps."""
    world, (layout, _) = World(), validate(config)
    step = build_step(world, config, layout)
    batches = build_loader(world, config).steps(0, 2)
    step.run(0, LR, batches)
    saved = {}
    with count_step(step.parallel_model, step.optimizer) as counted:

        def enter_phase(phase: str) -> None:
            saved[phase] = counted.memory.current_bytes["activation"]
            counted.enter(phase)

        step.run(1, LR, batches, enter_phase)
    weights = torch.cat([p.detach().flatten() for p in step.parallel_model.module.parameters()])
    return Measured(saved["backward"], counted.memory.peak["temporary"], weights)


@pytest.fixture(scope="module")
def measured() -> dict[str | int, Measured]:
    return {
        name: measure_step(load_cpu_config(overrides=[*SHAPE, *overrides], ranks=1))
        for name, overrides in MODES.items()
    }


def test_activation_checkpointing_is_bitwise_equal(measured):
    for name, mode in measured.items():
        assert torch.equal(mode.weights, measured["none"].weights), name


def test_saved_activations_shrink_with_the_segment_size(measured):
    saved = [measured[name].saved for name in ("none", "selective", *SEGMENTS)]
    assert saved == sorted(saved, reverse=True)
    for smaller, larger in pairwise(SEGMENTS):
        assert measured[smaller].saved - measured[larger].saved == INPUT_BYTES * (LAYERS // smaller - LAYERS // larger)


def test_peak_memory_is_lowest_near_the_square_root_segment(measured):
    memory = {size: measured[size].saved + measured[size].recomputed for size in SEGMENTS}
    block = measured[2].recomputed - measured[1].recomputed
    best = sqrt(LAYERS * INPUT_BYTES / block)
    assert min(memory, key=lambda size: memory[size]) == min(SEGMENTS, key=lambda size: abs(size - best)) == 2


def test_activation_checkpointing_keeps_parameter_names():
    for overrides in MODES.values():
        config = load_cpu_config(overrides=[*SHAPE, *overrides], ranks=1)
        names = {
            name
            for name, _ in build_step(World(), config, validate(config)[0]).parallel_model.module.named_parameters()
        }
        assert f"decoder.blocks.{LAYERS - 1}.ffn.down.weight" in names


def test_memory_budget_holds_while_the_blocks_of_its_model_are_compiled(monkeypatch):
    """A budget of 0 keeps the inputs of a compiled block only."""
    budgets = []

    def compile_fx(graph, _inputs):
        budgets.append(functorch_config.activation_memory_budget)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    model = torch.nn.Module()
    model.blocks = blocks
    apply_compile(model, ParallelSpec(blocks="blocks.*"), memory_budget=0.25)
    for block in blocks:
        block(torch.ones(1, 2)).sum().backward()
    assert budgets == [0.25]  # equal blocks share a graph
    assert functorch_config.activation_memory_budget == 1.0


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({}, ["k", "v", "out", "up"]),
        ({"family": "gpt2", "kv_heads": 4, "ffn": 128}, ["k", "out", "down"]),
        ({"experts": 4}, ["k", "v", "out", "up"]),
    ],
    ids=["llama", "gpt2", "experts"],
)
def test_selective_checkpointing_saves_attention_and_half_of_the_products(monkeypatch, options, saved):
    decisions = []

    class Recorded(SelectivePolicy):
        def __call__(self, context, operation, *args, **kwargs):
            decision = super().__call__(context, operation, *args, **kwargs)
            name = operation.__name__.partition(".")[0]
            if name in (*MATMULS, *ATTENTION) and not context.is_recompute:
                decisions.append((name, decision == CheckpointPolicy.MUST_SAVE))
            return decision

    monkeypatch.setattr("meshwright.core.parallel.activation_memory.activation_checkpoint.SelectivePolicy", Recorded)
    shape = {"vocab": 16, "width": 32, "layers": 1, "heads": 4, "kv_heads": 1, "ffn": 128} | options
    model = build_model(ModelConfig(**shape), 0)
    (block,) = model.decoder.blocks
    checkpoint_block(block, "selective")
    tokens = torch.arange(16).view(2, 8)
    model(tokens, tokens)[0].backward()
    names = {"gpt2": ["q", "k", "v", "attention", "out", "up", "down"]}.get(
        options.get("family"), ["q", "k", "v", "attention", "out", "gate", "up", "down"]
    )
    if "experts" in options:
        names.insert(5, "router")
    assert [name for name, (_, is_saved) in zip(names, decisions, strict=True) if is_saved] == sorted(
        [*saved, "attention"], key=names.index
    )
