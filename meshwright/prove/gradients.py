"""Data-parallel gradients against one process: every parameter, with unequal masks and accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from meshwright.config import IGNORED, Batch, DataConfig, ModelConfig, RunConfig
from meshwright.data.loader import Decoder, Loader
from meshwright.data.source import Concatenated, Sample, Synthetic
from meshwright.data.stream import Stream
from meshwright.launch.ranks import run_ranks
from meshwright.model.init import build
from meshwright.parallel.replicate import Replicated
from meshwright.parallel.world import World
from meshwright.record.clock import StepClock
from meshwright.train.optimizer import Optimizer
from meshwright.train.precision import Precision
from meshwright.train.step import Step

TOLERANCE: dict[Literal["fp64", "fp32"], float] = {"fp64": 1e-10, "fp32": 2e-5}
"""Largest error of a gradient, relative to the largest entry of that parameter's gradient. float64 leaves 1e6 roundings
of room; float32 about 300, which a sum over the batch in another order may use."""

ACCUMULATION = 3
MICRO = 2


class Masked(Synthetic):
    """Synthetic samples of which a part, another for every sample, does not count."""

    def __getitem__(self, index: int) -> Sample:
        tokens, labels = super().__getitem__(index)
        valid = np.random.Generator(np.random.Philox(key=[index, 1])).integers(0, len(labels) + 1)
        return tokens, np.where(np.arange(len(labels)) < valid, labels, IGNORED)


def check_gradients(config: RunConfig) -> Iterator[tuple[str, bool, str]]:
    model, scaled = shrunk(config.model)
    ranks = min(4, max(2, config.layout.replicate))
    # DDP's static graph cannot skip a synchronisation in its first pass: such a config never accumulates.
    accumulation = 1 if config.replicate.static_graph else ACCUMULATION
    batch = Batch(ranks * accumulation * MICRO, MICRO, ranks, accumulation)
    note = "; checked on CPU" + (f", model scaled down: {scaled}" if scaled else "")
    if config.replicate.compress != "none":
        note += f"; without replicate.compress = {config.replicate.compress}, which rounds"
    if config.precision.compute not in TOLERANCE:
        note += f"; not in {config.precision.compute}, which rounds"
    for compute, tolerance in TOLERANCE.items():
        proof = replace(
            config,
            model=model,
            precision=replace(config.precision, compute=compute),
            replicate=replace(config.replicate, compress="none"),
        )
        source = Masked(1000, 16, model.vocab)
        # Both in processes of their own: autograd in this one would start CUDA, where there is one, and spoil the fork.
        launch = replace(config.launch, device="cpu")
        [expected] = run_ranks(reference, 1, proof, source, batch, launch=launch)
        gradients = run_ranks(parallel, ranks, proof, source, batch, launch=launch)
        name, error, factor = worst(expected, gradients[0])
        kept = error <= tolerance and all(same_bits(gradients[0], other) for other in gradients[1:])
        measured = f"{len(expected) - 1} gradients and the loss, worst {error:.1e} in {name} (allowed {tolerance:g})"
        if error > tolerance:
            measured += f", {factor:.4g} times the right one{meaning(factor, ranks)}"
        yield (
            f"{ranks} ranks, accumulation {accumulation}, unequal masks = one process ({compute})",
            kept,
            measured + note,
        )


def reference(_world: World, config: RunConfig, source: Masked, batch: Batch) -> dict[str, Tensor]:
    """One plain process, one batch, no code of the training path but the model."""
    model = build(config.model, config.seed, Precision(config.precision, torch.device("cpu")).weights)
    ids = stream_for(config, source, batch).step(0)
    tokens, labels = Decoder(Concatenated([source]), False)[ids].tensors
    total, count = model(tokens, labels)
    (total / count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {
        "loss": (total / count).detach()
    }


def parallel(world: World, config: RunConfig, source: Masked, batch: Batch) -> dict[str, Tensor]:
    """The real step, up to its update, on this rank."""
    precision = Precision(config.precision, world.device)
    model = build(config.model, config.seed, precision.weights)
    step = Step(
        Replicated(model, config.replicate, world),
        Optimizer(model, config.optimizer),
        precision,
        world,
        seed=config.seed,
        coordinate=world.rank,
    )
    stream = stream_for(config, source, batch)
    micro_batches = next(Loader(Concatenated([source]), stream, batch, world.rank, DataConfig(workers=0)).steps(0, 1))
    _, loss = step.gradient(0, micro_batches, StepClock(world.device))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None} | {"loss": loss}


def stream_for(config: RunConfig, source: Masked, batch: Batch) -> Stream:
    return Stream.over(config.seed, batch.global_, [len(source)], [1.0], 0.0)


def worst(expected: dict[str, Tensor], found: dict[str, Tensor]) -> tuple[str, float, float]:
    """(parameter, relative error, factor between found and expected) of the gradient that is furthest off."""
    answer = ("none", 0.0, 1.0)
    for name, right in expected.items():
        if name not in found:
            return name, float("inf"), 0.0
        got = found[name]
        error = float((got - right).abs().max() / right.abs().max().clamp_min(1e-300))
        if not error <= answer[1]:  # also true of NaN
            answer = (name, error, float((got * right).sum() / (right * right).sum().clamp_min(1e-300)))
    return answer


def meaning(factor: float, ranks: int) -> str:
    """What a clean factor usually comes from."""
    for value, cause in (
        (1 / ranks, "averaged over ranks once too often"),
        (ranks, "summed over ranks once too often"),
        (1 / ACCUMULATION, "divided by the micro-steps"),
        (ACCUMULATION, "not divided by the micro-steps"),
    ):
        if abs(factor / value - 1) < 1e-3:
            return f": {cause}"
    return ""


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def shrunk(model: ModelConfig) -> tuple[ModelConfig, str]:
    """The same structure at a size that fits anywhere, and what was scaled."""
    heads = min(model.heads, 4)
    kv_heads = max(1, heads * model.kv_heads // model.heads)
    while heads % kv_heads:
        kv_heads -= 1
    small: dict[str, Any] = {
        "vocab": min(model.vocab, 256),
        "width": min(model.width, 16 * heads) // (2 * heads) * 2 * heads or 2 * heads,
        "layers": min(model.layers, 2),
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": min(model.ffn, 96),
        "experts": min(model.experts, 4),
        "experts_active": min(model.experts_active, 4, model.experts or 4),
    }
    changed = [
        f"{key} {getattr(model, key)} to {value}" for key, value in small.items() if value != getattr(model, key)
    ]
    return replace(model, **small), ", ".join(changed)
