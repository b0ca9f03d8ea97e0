"""Throughput of each layout relative to a hand-written torch loop of the same layout, model, samples and optimizer.

The method is that of the throughput benchmark: one step of each loop per round, in a shuffled order, with the torch
loop twice to show the noise. Nothing is reported unless both sides reach the same first and last loss. On a busy host
the ratio of CPU seconds is the more stable one: it excludes other processes and waiting.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from benchmarks import meshwright_loop, torch_layout_loops
from benchmarks.peer_components import READ_LOSS_EVERY, RunSteps, SampleDataset, lr_multiplier, make_adamw
from benchmarks.throughput import (
    MESHWRIGHT,
    TORCH,
    TORCH_REPEATED,
    ratio_statistics,
    run_race,
    settings,
)
from benchmarks.torch_layout_loops import RANKS, LoopInputs
from meshwright.base.config import BatchConfig, LayoutConfig, ModelConfig
from meshwright.core.data.sample_lookup import build_stream
from meshwright.core.models.init import build_model
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job

MODEL = ModelConfig(vocab=1024, width=192, layers=4, heads=6, kv_heads=2, ffn=512)
SEQUENCE = 128
GLOBAL = 8
ROUNDS = 50
MIN_RATIO = 0.98
"""Target: the smallest ratio of tokens per second to the torch loop of the same layout."""
LOSS_TOLERANCE = 1e-4

LAYOUTS: dict[str, tuple[LayoutConfig, Callable[[LoopInputs], RunSteps]]] = {
    "replicate 2 (DDP)": (LayoutConfig(2), torch_layout_loops.ddp),
    "shard optimizer 2 (FSDP2, reshard_after_forward=False)": (
        LayoutConfig(2, "optimizer"),
        partial(torch_layout_loops.fsdp, reshard_after_forward=False),
    ),
    "shard parameters 2 (FSDP2)": (
        LayoutConfig(2, "parameters"),
        partial(torch_layout_loops.fsdp, reshard_after_forward=True),
    ),
    "tensor 2 (DTensor, sequence parallel)": (LayoutConfig(1, tensor=2), torch_layout_loops.tensor),
}
"""Each layout, and the torch loop for it."""


def measure() -> dict[str, Any]:
    result: dict[str, Any] = {
        "ranks": RANKS,
        "model": f"width {MODEL.width}, layers {MODEL.layers}, vocabulary {MODEL.vocab}",
        "global_batch": GLOBAL,
        "sequence": SEQUENCE,
        "rounds": ROUNDS,
    }
    return result | {"layouts": {name: measure_layout(name, *layout) for name, layout in LAYOUTS.items()}}


def measure_layout(name: str, layout: LayoutConfig, torch_loop: Callable[[LoopInputs], RunSteps]) -> dict[str, Any]:
    print(f"layouts: {name}", file=sys.stderr, flush=True)
    config = settings()
    data = replace(config.data, kind="synthetic", sequence=SEQUENCE)
    config = replace(config, model=MODEL, data=data, layout=layout, batch=BatchConfig(GLOBAL))
    torch_peer = partial(make_loop, torch_loop)
    loops = {MESHWRIGHT: meshwright_loop.make_loop, TORCH: torch_peer, TORCH_REPEATED: torch_peer}
    seconds, cpu_seconds, losses = run_race(config, loops, ROUNDS, 1)
    last = (
        (len(losses[MESHWRIGHT]) - 1) // READ_LOSS_EVERY * READ_LOSS_EVERY
    )  # the last step at which the torch loop reads its loss
    compared = {step: {loop: values[step] for loop, values in losses.items()} for step in (0, last)}
    for step, by_loop in compared.items():
        difference = max(by_loop.values()) - min(by_loop.values())
        assert difference < LOSS_TOLERANCE, f"{name}: different losses at step {step}: {by_loop}"
    tokens = GLOBAL * SEQUENCE
    return {
        "tokens_per_second": {loop: round(tokens / statistics.median(values)) for loop, values in seconds.items()},
        "step_ms": {loop: round(statistics.median(values) * 1e3, 2) for loop, values in seconds.items()},
        "loss_at_step": compared,
        "ratio_to_torch": ratio_statistics(seconds[MESHWRIGHT], seconds[TORCH]),
        "ratio_of_cpu_seconds": ratio_statistics(cpu_seconds[MESHWRIGHT], cpu_seconds[TORCH]),
        "noise": ratio_statistics(seconds[TORCH_REPEATED], seconds[TORCH]),
    }


def make_loop(torch_loop: Callable[[LoopInputs], RunSteps], job: Job, world: World) -> RunSteps:
    """A torch loop on the samples that Meshwright reads, in the same order."""
    config, stream = job.config, build_stream(job.config, job.sources)
    data_rank, degree = job.layout.data_coordinate(world.rank), job.layout.data_degree
    ids = [stream.local_samples(step, data_rank, degree).tolist() for step in range(config.steps)]
    return torch_loop(
        LoopInputs(
            build_model(config.model, config.seed),
            iter(DataLoader(SampleDataset(job.sources[0]), batch_sampler=ids)),
            lambda model: make_adamw(model, config.optimizer),
            lr_multiplier(job),
            config.optimizer.clip,
            READ_LOSS_EVERY,
        )
    )
