"""Step throughput on two CPU ranks relative to torch, accelerate and Fabric, in one launch and in interleaved rounds.

In a round every loop runs one step, in a shuffled order; the result is the median over rounds of the ratio within a
round, so that a disturbance that is longer than a round affects both sides. Rounds are short and many because the speed
of a busy host changes from second to second. The torch loop runs twice: the ratio of the two shows the noise. A second
measurement on a very small model shows the overhead of the loops themselves.
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

from benchmarks import accelerate_loop, fabric_loop, meshwright_loop, torch_ddp_loop
from benchmarks.peer_components import READ_LOSS_EVERY, RunSteps
from meshwright.base.config import BatchConfig, EvalConfig, ModelConfig, RunConfig, load_config
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.launch.job import make_job
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job

MakeLoop = Callable[[Job, World], RunSteps]
Rounds = dict[str, list[float]]
"""The values of each loop by round."""

RANKS = 2
MICRO = 8
WARMUP_ROUNDS = 2
"""Rounds that run before the counted ones."""

SMALL_MODEL = ModelConfig(width=16, layers=1, heads=2, kv_heads=1, ffn=16)
SMALL_SEQUENCE = 8
SMALL_STEPS = 5
"""A model so small that a step consists of the loop around it. Several steps per round, because a barrier takes longer
than one such step.
"""

MESHWRIGHT = "meshwright"
TORCH = "torch"
TORCH_REPEATED = "torch, repeated"
PEERS: dict[str, tuple[ModuleType, str]] = {
    TORCH: (torch_ddp_loop, "torch"),
    TORCH_REPEATED: (torch_ddp_loop, "torch"),
    "accelerate": (accelerate_loop, "accelerate"),
    "lightning-fabric": (fabric_loop, "lightning_fabric"),
}
"""The loop of each peer, and the package that it needs."""
TARGETS = {TORCH: 0.98, "accelerate": 1.0, "lightning-fabric": 1.0}
"""The smallest ratio of steps per second to each peer."""


def measure(rounds: int) -> dict[str, Any]:
    missing = {name: reason for name, (_, package) in PEERS.items() if (reason := import_error(package))}
    names = [MESHWRIGHT, *(name for name in PEERS if name not in missing)]
    config = settings()
    loops = {name: (meshwright_loop if name == MESHWRIGHT else PEERS[name][0]).make_loop for name in names}
    seconds, _, losses = run_race(config, loops, rounds, 1)
    tokens = config.batch.global_ * config.data.sequence
    ratios = {
        name: None if name in missing else ratio_statistics(seconds[MESHWRIGHT], seconds[name]) for name in TARGETS
    }
    small = replace(config, model=SMALL_MODEL, data=replace(config.data, sequence=SMALL_SEQUENCE))
    small_seconds, _, _ = run_race(small, loops, rounds, SMALL_STEPS)
    return {
        "ranks": RANKS,
        "micro_batch": MICRO,
        "sequence": config.data.sequence,
        "rounds": rounds,
        "steps_per_round": 1,
        "loss_read": {
            MESHWRIGHT: "every step, over all ranks, recorded",
            "peers": f"every {READ_LOSS_EVERY} steps, of the local rank",
        },
        "tokens_per_second": {name: round(tokens / statistics.median(seconds[name])) for name in names},
        "step_ms": {name: round(statistics.median(seconds[name]) * 1e3, 2) for name in names},
        "last_loss": {name: values[-1] for name, values in losses.items()},
        "ratio_to": ratios,
        "missing": missing,
        "noise": ratio_statistics(seconds[TORCH_REPEATED], seconds[TORCH]),
        "loop_overhead": {
            "model": f"width {SMALL_MODEL.width}, layers {SMALL_MODEL.layers}, sequence {SMALL_SEQUENCE}",
            "step_us": {name: round(statistics.median(small_seconds[name]) * 1e6) for name in names},
        },
    }


def settings() -> RunConfig:
    """The tiny preset without evaluation in the timed steps."""
    config = load_config(ranks=RANKS)
    batch = BatchConfig(MICRO * RANKS, MICRO)
    return replace(config, batch=batch, eval=EvalConfig(every=0), launch=replace(config.launch, device="cpu"))


def run_race(config: RunConfig, loops: dict[str, MakeLoop], rounds: int, steps: int) -> tuple[Rounds, Rounds, Rounds]:
    """By loop and counted round: seconds and CPU seconds per step of rank 0, and the mean loss over ranks."""
    config = replace(config, steps=(rounds + WARMUP_ROUNDS) * steps)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        job = make_job(config, RunFolder(Path(folder)))
        by_rank = run_ranks(race, RANKS, job, loops, steps, timeout=900.0, launch=config.launch)
    seconds, cpu_seconds = (
        {name: [value / steps for value in values[WARMUP_ROUNDS:]] for name, values in timed.items()}
        for timed in by_rank[0][:2]
    )
    by_loop = {name: zip(*(losses[name] for _, _, losses in by_rank), strict=True) for name in loops}
    losses = {name: [round(statistics.mean(ranks), 6) for ranks in rounds] for name, rounds in by_loop.items()}
    return seconds, cpu_seconds, losses


def import_error(package: str) -> str:
    """Import a package before the ranks are forked, so that they share it; the error message, or '' if it imports."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        return str(error)
    return ""


def race(world: World, job: Job, loops: dict[str, MakeLoop], steps: int) -> tuple[Rounds, Rounds, Rounds]:
    """On each rank, by loop and round: seconds, CPU seconds, and the last loss that the loop has read."""
    os.dup2(2, 1)  # standard output is for the result: peers may print
    set_torchrun_variables(world)
    runs = {name: make_loop(job, world) for name, make_loop in loops.items()}
    torch.set_num_threads(job.config.launch.threads)  # a peer may have changed it
    gc.collect()
    gc.freeze()  # no loop pays for garbage collection of what the others have imported
    order = list(loops)
    seconds: Rounds = {name: [] for name in loops}
    cpu_seconds: Rounds = {name: [] for name in loops}
    losses: Rounds = {name: [] for name in loops}
    rounds = job.config.steps // steps
    for number in range(rounds):
        random.Random(number).shuffle(order)  # equal on every rank; no loop always follows the same other loop
        for name in order:
            # Meshwright requests deterministic kernels and pays for them; the peers do not.
            torch.use_deterministic_algorithms(name == MESHWRIGHT, warn_only=True)
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            losses[name].append(runs[name](steps))
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            cpu_seconds[name].append(time.process_time() - cpu_start)
        if world.rank == 0 and (number + 1) % 20 == 0:
            shown = ", ".join(f"{name} {statistics.median(s[-20:]) / steps * 1e3:.1f}" for name, s in seconds.items())
            print(f"round {number + 1} of {rounds}, ms per step: {shown}", file=sys.stderr, flush=True)
    return seconds, cpu_seconds, losses


def set_torchrun_variables(world: World) -> None:
    """Peers read their rank from these variables; the process group exists already."""
    size, rank = str(world.size), str(world.rank)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def ratio_statistics(own_seconds: list[float], peer_seconds: list[float]) -> dict[str, Any]:
    """The ratio of steps per second to a peer: the median over rounds with its 95 % interval (order statistics, normal
    approximation), and the ratio of the tenth percentiles, which is less sensitive to load on the machine.
    """
    ordered = sorted(peer / own for own, peer in zip(own_seconds, peer_seconds, strict=True))
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
        "ratio_of_tenth_percentiles": round(sorted(peer_seconds)[tenth] / sorted(own_seconds)[tenth], 4),
    }
