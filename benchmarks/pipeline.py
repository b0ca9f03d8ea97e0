"""Memory and idle time of pipeline schedules on real steps, next to what each schedule predicts.

Micro-batches in flight and peak activation bytes are counted, the same on every machine. Idle time is measured, and
means little if there are more ranks than cores.
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
    """Counts on two and four ranks; idle time on two, or on four if there are four cores."""
    enough_cores = len(os.sched_getaffinity(0)) >= 4
    tables = {
        f"{ranks} ranks, 8 micro-batches": measure_schedules(ranks, 8, timed=ranks == 2 or enough_cores)
        for ranks in (2, 4)
    }
    return {"unit": "activation bytes of one process without a pipeline", "tables": tables}


def measure_schedules(ranks: int, micro_batches: int, timed: bool) -> dict[str, Any]:
    options = [*SHAPE, f"--batch.global={micro_batches}", "--batch.micro=1", "--layout.replicate=1"]
    single = load_config(overrides=options)
    [single_bytes] = run_ranks(peak_activation_bytes, 1, single)
    rows = {}
    for kind in SCHEDULES:
        config = replace(
            single,
            layout=replace(single.layout, pipeline=ranks),
            pipeline=replace(single.pipeline, schedule=kind, stages=SCHEDULES[kind].default_stages),
        )
        predicted = build_timeline(kind, ranks, micro_batches)
        measured = run_ranks(measure_rank, ranks, config)
        rows[kind] = {
            "bubble in slots": round(float(predicted.bubble), 4),
            "micro-batches in flight, predicted": predicted.rank_peaks,
            "micro-batches in flight, measured": [rank["in_flight"] for rank in measured],
            "activation bytes": [round(rank["activation"] / single_bytes, 3) for rank in measured],
        }
        if timed:
            rows[kind]["idle fraction, measured"] = [rank["idle"] for rank in measured]
    return rows


def peak_activation_bytes(world: World, config: RunConfig) -> int:
    return count_third_step(world, config).memory.peak["activation"]


def measure_rank(world: World, config: RunConfig) -> dict[str, Any]:
    layout, batch = validate(config)
    step = build_step(world, config, layout)
    loader = Loader(ConcatenatedSource([proof_source(config)]), proof_stream(config), batch, 0, DataConfig(workers=0))
    batches = loader.steps(0, STEPS)
    outcomes = [step.run(number, LR, batches) for number in range(STEPS)][2:]
    in_flight = {outcome.in_flight.peak_total for outcome in outcomes if outcome.in_flight is not None}
    idle = [idle_fraction(outcome.clock.seconds()) for outcome in outcomes]
    return {
        "in_flight": max(in_flight),
        "idle": round(median(idle), 3),
        "activation": peak_activation_bytes(world, config),
    }
