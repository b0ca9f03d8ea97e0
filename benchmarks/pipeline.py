"""Memory and idle time of pipeline schedules on real steps, next to what each schedule predicts.

Micro-batches in flight and peak activation bytes are counted, the same on every machine. Idle time is measured, and
means little if there are more ranks than cores.
"""

from __future__ import annotations

import os
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.step_bytes import count_third_step, run_training
from meshwright.base.config import load_config
from meshwright.base.topology.schedule_timeline import build_timeline
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.core.trainer.loop import Training
from meshwright.core.trainer.records.step_recorder import idle_fraction

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
    [single_bytes] = run_training(peak_activation_bytes, single)
    rows = {}
    for kind in SCHEDULES:
        config = replace(
            single,
            layout=replace(single.layout, pipeline=ranks),
            pipeline=replace(single.pipeline, schedule=kind, stages=SCHEDULES[kind].default_stages),
        )
        predicted = build_timeline(kind, ranks, micro_batches)
        measured = run_training(measure_rank, config)
        rows[kind] = {
            "bubble in slots": round(float(predicted.bubble), 4),
            "micro-batches in flight, predicted": predicted.rank_peaks,
            "micro-batches in flight, measured": [rank["in_flight"] for rank in measured],
            "activation bytes": [round(rank["activation"] / single_bytes, 3) for rank in measured],
        }
        if timed:
            rows[kind]["idle fraction, measured"] = [rank["idle"] for rank in measured]
    return rows


def peak_activation_bytes(training: Training) -> int:
    return count_third_step(training).memory.peak["activation"]


def measure_rank(training: Training) -> dict[str, Any]:
    activation, step = peak_activation_bytes(training), training.step
    learning_rate = training.resume.learning_rate
    outcomes = [step.run(number, learning_rate(number), training.batches) for number in range(3, STEPS)]
    in_flight = {outcome.in_flight.peak_total for outcome in outcomes if outcome.in_flight is not None}
    idle = [idle_fraction(outcome.clock.seconds()) for outcome in outcomes]
    return {"in_flight": max(in_flight), "idle": round(median(idle), 3), "activation": activation}
