"""Step throughput on two CPU ranks beside plain torch, accelerate and Fabric, in one launch and in interleaved rounds.

A round gives every contender a step, one after the other, in a shuffled order; the figure is the median over rounds
of the ratio within a round, so that what disturbs the machine for longer than a round disturbs both sides. Rounds are
short and many because a busy host's speed wanders from second to second. The plain loop runs twice: the ratio of it to
itself says how much of a difference is noise. A second race, on a model so small that only the loop is left, shows what
the loops themselves cost.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import own, plain_torch, with_accelerate, with_fabric
from benchmarks.ordinary import READ_EVERY, Run
from meshwright.config import BatchConfig, EvalConfig, ModelConfig, RunConfig, load_config
from meshwright.launch.job import make_job
from meshwright.launch.ranks import run_ranks
from meshwright.parallel.world import World
from meshwright.telemetry.run_folder import RunFolder
from meshwright.trainer.loop import Job

Contender = Callable[[Job, World], Run]
Rounds = dict[str, list[float]]
"""A contender's figures by round."""

RANKS = 2
MICRO = 8
WARM_UP = 2
"""Rounds that are run and not counted."""

BARE_MODEL = ModelConfig(width=16, layers=1, heads=2, kv_heads=1, ffn=16)
BARE_SEQUENCE = 8
BARE_STEPS = 5
"""So small a model that a step is the loop around it; several steps a round, since one is short beside a barrier."""

OWN = "meshwright"
PLAIN = "plain torch"
AGAIN = "plain torch, again"
PEERS: dict[str, tuple[ModuleType, str]] = {
    PLAIN: (plain_torch, "torch"),
    AGAIN: (plain_torch, "torch"),
    "accelerate": (with_accelerate, "accelerate"),
    "lightning-fabric": (with_fabric, "lightning_fabric"),
}
"""Each peer's loop, and the package it needs."""
TARGETS = {PLAIN: 0.98, "accelerate": 1.0, "lightning-fabric": 1.0}
"""The least that Meshwright's steps a second may be of a peer's."""


def measure(rounds: int) -> dict[str, Any]:
    missing = {name: reason for name, (_, package) in PEERS.items() if (reason := why_missing(package))}
    names = [OWN, *(name for name in PEERS if name not in missing)]
    config = settings()
    contenders = {name: (own if name == OWN else PEERS[name][0]).contender for name in names}
    seconds, _, losses = raced(config, contenders, rounds, 1)
    tokens = config.batch.global_ * config.data.sequence
    compared = {name: None if name in missing else spread(seconds[OWN], seconds[name]) for name in TARGETS}
    bare = replace(config, model=BARE_MODEL, data=replace(config.data, sequence=BARE_SEQUENCE))
    bare_seconds, _, _ = raced(bare, contenders, rounds, BARE_STEPS)
    return {
        "ranks": RANKS,
        "micro_batch": MICRO,
        "sequence": config.data.sequence,
        "rounds": rounds,
        "steps_a_round": 1,
        "loss_read": {OWN: "every step, over all ranks, recorded", "peers": f"every {READ_EVERY} steps, own rank's"},
        "tokens_per_second": {name: round(tokens / statistics.median(seconds[name])) for name in names},
        "step_ms": {name: round(statistics.median(seconds[name]) * 1e3, 2) for name in names},
        "last_loss": {name: values[-1] for name, values in losses.items()},
        "ratio_to": compared,
        "missing": missing,
        "noise": spread(seconds[AGAIN], seconds[PLAIN]),
        "loop_alone": {
            "model": f"width {BARE_MODEL.width}, layers {BARE_MODEL.layers}, sequence {BARE_SEQUENCE}",
            "step_us": {name: round(statistics.median(bare_seconds[name]) * 1e6) for name in names},
        },
    }


def settings() -> RunConfig:
    """The tiny preset, with no evaluation inside the timed steps."""
    config = load_config(ranks=RANKS)
    batch = BatchConfig(MICRO * RANKS, MICRO)
    return replace(config, batch=batch, eval=EvalConfig(every=0), launch=replace(config.launch, device="cpu"))


def raced(
    config: RunConfig, contenders: dict[str, Contender], rounds: int, steps: int
) -> tuple[Rounds, Rounds, Rounds]:
    """Of each contender: seconds a step and processor seconds a step (of rank 0) in every counted round, and its losses
    by round (the mean over ranks).
    """
    config = replace(config, steps=(rounds + WARM_UP) * steps)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        job = make_job(config, RunFolder(Path(folder)))
        found = run_ranks(race, RANKS, job, contenders, steps, timeout=900.0, launch=config.launch)
    seconds, processor = (
        {name: [value / steps for value in values[WARM_UP:]] for name, values in timed.items()}
        for timed in found[0][:2]
    )
    by_rank = {name: zip(*(losses[name] for _, _, losses in found), strict=True) for name in contenders}
    losses = {name: [round(statistics.mean(one), 6) for one in values] for name, values in by_rank.items()}
    return seconds, processor, losses


def why_missing(package: str) -> str:
    """Imported before the ranks are forked, so that they need not."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        return str(error)
    return ""


def race(world: World, job: Job, contenders: dict[str, Contender], steps: int) -> tuple[Rounds, Rounds, Rounds]:
    """On each rank, of every contender by round: seconds, processor seconds, and the loss that it read last by then."""
    os.dup2(2, 1)  # standard output is for the result alone, whatever a peer prints
    speak_as_torchrun(world)
    runs = {name: contender(job, world) for name, contender in contenders.items()}
    torch.set_num_threads(job.config.launch.threads)  # whatever a peer has set
    gc.collect()
    gc.freeze()  # no contender pays for walking what the others have imported
    order = list(contenders)
    seconds: Rounds = {name: [] for name in contenders}
    processor: Rounds = {name: [] for name in contenders}
    losses: Rounds = {name: [] for name in contenders}
    rounds = job.config.steps // steps
    for number in range(rounds):
        random.Random(number).shuffle(order)  # the same on every rank; no contender always follows the same other
        for name in order:
            # Meshwright asks for deterministic kernels and pays for them; a peer's loop does not ask.
            torch.use_deterministic_algorithms(name == OWN, warn_only=True)
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            losses[name].append(runs[name](steps))
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - used)
        if world.rank == 0 and (number + 1) % 20 == 0:
            shown = ", ".join(f"{name} {statistics.median(s[-20:]) / steps * 1e3:.1f}" for name, s in seconds.items())
            print(f"round {number + 1} of {rounds}, ms a step: {shown}", file=sys.stderr, flush=True)
    return seconds, processor, losses


def speak_as_torchrun(world: World) -> None:
    """Peers learn their place from these variables; the process group itself is there already."""
    size, rank = str(world.size), str(world.rank)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def spread(own_seconds: list[float], peer_seconds: list[float]) -> dict[str, Any]:
    """Steps a second over the peer's. The median over rounds has its 95 % interval beside it (order statistics, normal
    approximation); the tenth percentile of each side's rounds sees less of what disturbs a busy machine.
    """
    ordered = sorted(theirs / ours for ours, theirs in zip(own_seconds, peer_seconds, strict=True))
    last = len(ordered) - 1
    half = 0.98 * math.sqrt(len(ordered))
    interval = ordered[max(0, math.floor(last / 2 - half))], ordered[min(last, math.ceil(last / 2 + half))]
    tenth = last // 10
    return {
        "median": round(statistics.median(ordered), 4),
        "median_interval": [round(value, 4) for value in interval],
        "quartiles": [round(ordered[round(last * share)], 4) for share in (0.25, 0.75)],
        "min": round(ordered[0], 4),
        "max": round(ordered[-1], 4),
        "of_tenth_percentiles": round(sorted(peer_seconds)[tenth] / sorted(own_seconds)[tenth], 4),
    }
