"""What is computed again is not held: counted bytes of activations, and the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

import pytest
import torch

from meshwright.config import RunConfig, load_config
from meshwright.data.loader import Loader
from meshwright.data.source import ConcatenatedSource
from meshwright.parallel.world import World
from meshwright.prover.reference import LR, build_step, proof_source, proof_stream
from meshwright.topology.unsupported import validate
from meshwright.trainer.step_counters import count_step

LAYERS = 36
SHAPE = ["--model.width=32", "--model.ffn=8", "--model.heads=1", "--model.kv_heads=1", f"--model.layers={LAYERS}"]
SHAPE += ["--model.vocab=16", "--data.sequence=16", "--batch.global=4"]
INPUT = 4 * 16 * 32 * 4
"""Bytes that enter a block."""
SEGMENTS = (1, 2, 4, 12)
WAYS = {
    "none": [],
    "selective": ["--activation_checkpoint.mode=selective"],
    **{size: ["--activation_checkpoint.mode=full", f"--activation_checkpoint.segment={size}"] for size in SEGMENTS},
}


@dataclass(frozen=True)
class Ran:
    kept: int
    """bytes of activations when backward begins"""
    again: int
    """the most that backward made again, with its own temporaries"""
    weights: torch.Tensor


def ran(config: RunConfig) -> Ran:
    """The second of two steps."""
    world, (layout, batch) = World(), validate(config)
    step = build_step(world, config, layout)
    batches = Loader(ConcatenatedSource([proof_source(config)]), proof_stream(config), batch, 0, config.data).steps(
        0, 2
    )
    step.run(0, LR, batches)
    kept = {}
    with count_step(step.parallel_model, step.optimizer) as counted:

        def watch(phase: str) -> None:
            kept[phase] = counted.memory.current_bytes["activation"]
            counted.enter(phase)

        step.run(1, LR, batches, watch)
    weights = torch.cat([p.detach().flatten() for p in step.parallel_model.module.parameters()])
    return Ran(kept["backward"], counted.memory.peak["temporary"], weights)


@pytest.fixture(scope="module")
def ways() -> dict[str | int, Ran]:
    return {name: ran(load_config(overrides=[*SHAPE, *words], ranks=1)) for name, words in WAYS.items()}


def test_recomputation_changes_no_bit(ways):
    for name, way in ways.items():
        assert torch.equal(way.weights, ways["none"].weights), name


def test_what_is_kept_falls_with_the_size_of_a_segment(ways):
    kept = [ways[name].kept for name in ("none", "selective", *SEGMENTS)]
    assert kept == sorted(kept, reverse=True)
    for one, other in pairwise(SEGMENTS):
        assert ways[one].kept - ways[other].kept == INPUT * (LAYERS // one - LAYERS // other)


def test_the_least_is_held_at_the_square_root(ways):
    held = {size: ways[size].kept + ways[size].again for size in SEGMENTS}
    block = ways[2].again - ways[1].again
    best = sqrt(LAYERS * INPUT / block)
    assert min(held, key=lambda size: held[size]) == min(SEGMENTS, key=lambda size: abs(size - best)) == 2


def test_names_of_parameters_do_not_change():
    for words in WAYS.values():
        config = load_config(overrides=[*SHAPE, *words], ranks=1)
        names = {
            name
            for name, _ in build_step(World(), config, validate(config)[0]).parallel_model.module.named_parameters()
        }
        assert f"decoder.blocks.{LAYERS - 1}.ffn.down.weight" in names
