"""Memory and communication of ZeRO stages: peak bytes by class and wire bytes per step, counted on real steps.

The values are multiples of the bytes of all parameters. They are counts, and so the same on every machine.
"""

from __future__ import annotations

from typing import Any

from benchmarks.step_bytes import count_third_step, run_training
from meshwright.base.config import load_config
from meshwright.core.trainer.loop import Training

RANKS = 4
STAGES = {"none": "ZeRO-0", "optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "ZeRO-3"}
SHAPE = ["--model.width=64", "--model.layers=8", "--model.ffn=176", "--model.vocab=256", "--data.sequence=16"]


def measure() -> dict[str, Any]:
    table = {}
    for accumulation in (1, 4):
        for kind, name in STAGES.items():
            options = [*SHAPE, f"--layout.shard={kind}", f"--batch.global={RANKS * accumulation}", "--batch.micro=1"]
            config = load_config(overrides=options, ranks=RANKS)
            table[f"{name}, {accumulation} micro-steps"] = run_training(measure_stage, config)[0]
    return {"ranks": RANKS, "unit": "bytes of all parameters", "table": table}


def measure_stage(training: Training) -> dict[str, float]:
    counted = count_third_step(training)
    parameter_bytes = sum(parameter.numel() for parameter in training.module.parameters()) * 4
    wire = sum(group.wire_bytes for group in counted.rows() if group.axis != "control")
    memory = {
        kind: round(counted.memory.peak[kind] / parameter_bytes, 3) for kind in ("parameter", "gradient", "optimizer")
    }
    return memory | {"wire x n / (n - 1)": round(wire / parameter_bytes * RANKS / (RANKS - 1), 3)}
