"""What pipeline schedules hold and how long they wait, on real steps: live micro-batches and peak bytes of activations
of every rank, and the share of time in which it waited, beside what the schedule alone promises.

What is held is counted, the same on every machine. Waiting is timed, and means little where ranks outnumber cores.
"""

from __future__ import annotations

import os
from dataclasses import replace
from statistics import median
from typing import Any

from meshwright.config import RunConfig, load_config
from meshwright.parallel.world import World
from meshwright.prover.comm_volume import count_third_step
from meshwright.prover.reference import (
    LR,
    ConcatenatedSource,
    DataConfig,
    Loader,
    build_step,
    proof_source,
    proof_stream,
)
from meshwright.testing import run_ranks
from meshwright.topology.schedule_timeline import build_timeline
from meshwright.topology.schedules import SCHEDULES
from meshwright.topology.unsupported import validate
from meshwright.trainer.step_recorder import idle_fraction

SHAPE = ["--model.width=64", "--model.layers=8", "--model.ffn=176", "--model.vocab=64", "--data.sequence=16"]
STEPS = 12


def measure() -> dict[str, Any]:
    """Counts on four ranks; waiting on two, one for each of two cores."""
    few = len(os.sched_getaffinity(0)) < 4
    tables = {f"{ranks} ranks, 8 micro-batches": table(ranks, 8, timed=ranks == 2 or not few) for ranks in (2, 4)}
    return {"in units of": "bytes of activations of one process without a pipeline", "tables": tables}


def table(ranks: int, micros: int, timed: bool) -> dict[str, Any]:
    words = [*SHAPE, f"--batch.global={micros}", "--batch.micro=1", "--layout.replicate=1"]
    alone = load_config(overrides=words)
    [whole] = run_ranks(activation, 1, alone)
    rows = {}
    for kind in SCHEDULES:
        config = replace(
            alone,
            layout=replace(alone.layout, pipeline=ranks),
            pipeline=replace(alone.pipeline, schedule=kind, stages=SCHEDULES[kind].default_stages),
        )
        promised = build_timeline(kind, ranks, micros)
        found = run_ranks(row, ranks, config)
        rows[kind] = {
            "bubble in slots": round(float(promised.bubble), 4),
            "live promised": promised.rank_peaks,
            "live measured": [one["live"] for one in found],
            "activations": [round(one["activation"] / whole, 3) for one in found],
        }
        if timed:
            rows[kind]["waiting measured"] = [one["idle"] for one in found]
    return rows


def activation(world: World, config: RunConfig) -> int:
    return count_third_step(world, config).memory.peak["activation"]


def row(world: World, config: RunConfig) -> dict[str, Any]:
    layout, batch = validate(config)
    step = build_step(world, config, layout)
    loader = Loader(ConcatenatedSource([proof_source(config)]), proof_stream(config), batch, 0, DataConfig(workers=0))
    batches = loader.steps(0, STEPS)
    outcomes = [step.run(number, LR, batches) for number in range(STEPS)][2:]
    live = {outcome.in_flight.peak_total for outcome in outcomes if outcome.in_flight is not None}
    waited = [idle_fraction(outcome.clock.seconds()) for outcome in outcomes]
    return {"live": max(live), "idle": round(median(waited), 3), "activation": activation(world, config)}
