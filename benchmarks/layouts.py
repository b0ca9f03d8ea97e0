"""The training step under each layout beside plain torch's way to the same layout: same model, samples and optimizer.

The race is the throughput benchmark's: a step of each contender a round, in a shuffled order, the plain loop twice to
say what is noise. Nothing is reported unless both sides came to the same losses, first and last. On a busy host the
ratio of processor seconds is the steadier one: it does not see who else ran, nor what a rank waited for.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from benchmarks import own, plain_layouts
from benchmarks.ordinary import READ_EVERY, Run, Samples, adamw, share_of_peak
from benchmarks.plain_layouts import RANKS, Given
from benchmarks.throughput import AGAIN, OWN, PLAIN, raced, settings, spread
from meshwright.config import BatchConfig, LayoutConfig, ModelConfig
from meshwright.data.sample_lookup import build_stream
from meshwright.models.init import build_model
from meshwright.parallel.world import World
from meshwright.trainer.loop import Job

MODEL = ModelConfig(vocab=1024, width=192, layers=4, heads=6, kv_heads=2, ffn=512)
SEQUENCE = 128
GLOBAL = 8
ROUNDS = 50
LEAST = 0.98
"""The least that Meshwright's tokens a second may be of plain torch's on the same layout."""
SAME_LOSS = 1e-4

LAYOUTS: dict[str, tuple[LayoutConfig, Callable[[Given], Run]]] = {
    "replicate 2 (DDP)": (LayoutConfig(2), plain_layouts.ddp),
    "shard optimizer 2 (FSDP2, kept gathered)": (
        LayoutConfig(2, "optimizer"),
        partial(plain_layouts.fsdp, reshard=False),
    ),
    "shard parameters 2 (FSDP2)": (LayoutConfig(2, "parameters"), partial(plain_layouts.fsdp, reshard=True)),
    "tensor 2 (DTensor, sequence parallel)": (LayoutConfig(1, tensor=2), plain_layouts.tensor),
}
"""Each layout, and plain torch's step on it."""


def measure() -> dict[str, Any]:
    result: dict[str, Any] = {
        "ranks": RANKS,
        "model": f"width {MODEL.width}, layers {MODEL.layers}, vocabulary {MODEL.vocab}",
        "global_batch": GLOBAL,
        "sequence": SEQUENCE,
        "rounds": ROUNDS,
    }
    return result | {"layouts": {name: one_layout(name, *how) for name, how in LAYOUTS.items()}}


def one_layout(name: str, layout: LayoutConfig, step: Callable[[Given], Run]) -> dict[str, Any]:
    print(f"layouts: {name}", file=sys.stderr, flush=True)
    config = settings()
    data = replace(config.data, kind="synthetic", sequence=SEQUENCE)
    config = replace(config, model=MODEL, data=data, layout=layout, batch=BatchConfig(GLOBAL))
    plain = partial(contender, step)
    seconds, processor, losses = raced(config, {OWN: own.contender, PLAIN: plain, AGAIN: plain}, ROUNDS, 1)
    last = (len(losses[OWN]) - 1) // READ_EVERY * READ_EVERY  # the last step whose loss plain torch's loop reads
    read = {number: {who: values[number] for who, values in losses.items()} for number in (0, last)}
    for number, found in read.items():
        apart = max(found.values()) - min(found.values())
        assert apart < SAME_LOSS, f"{name}: not the same loss at step {number}: {found}"
    tokens = GLOBAL * SEQUENCE
    return {
        "tokens_per_second": {who: round(tokens / statistics.median(values)) for who, values in seconds.items()},
        "step_ms": {who: round(statistics.median(values) * 1e3, 2) for who, values in seconds.items()},
        "loss_at_step": read,
        "ratio_to_plain": spread(seconds[OWN], seconds[PLAIN]),
        "ratio_of_processor_seconds": spread(processor[OWN], processor[PLAIN]),
        "noise": spread(seconds[AGAIN], seconds[PLAIN]),
    }


def contender(step: Callable[[Given], Run], job: Job, world: World) -> Run:
    """Plain torch on the samples that Meshwright reads, in its order."""
    config, stream = job.config, build_stream(job.config, job.sources)
    coordinate, degree = job.layout.data_coordinate(world.rank), job.layout.data_degree
    ids = [stream.local_samples(number, coordinate, degree).tolist() for number in range(config.steps)]
    return step(
        Given(
            build_model(config.model, config.seed),
            iter(DataLoader(Samples(job.sources[0]), batch_sampler=ids)),
            lambda model: adamw(model, config.optimizer),
            share_of_peak(job),
            config.optimizer.clip,
            READ_EVERY,
        )
    )
