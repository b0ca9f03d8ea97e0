"""Memory and communication of ZeRO stages: peak bytes by class and wire bytes per step, counted on real steps.

The values are multiples of the bytes of all parameters. They are counts, and so the same on every machine.
"""

from __future__ import annotations

from typing import Any

from meshwright.config import RunConfig, load_config
from meshwright.models.registry import model_spec
from meshwright.parallel.world import World
from meshwright.prover.comm_volume import count_third_step
from meshwright.testing import run_ranks

RANKS = 4
STAGES = {"none": "ZeRO-0", "optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "ZeRO-3"}
SHAPE = ["--model.width=64", "--model.layers=8", "--model.ffn=176", "--model.vocab=256", "--data.sequence=16"]


def measure() -> dict[str, Any]:
    table = {}
    for accumulation in (1, 4):
        for kind, name in STAGES.items():
            options = [*SHAPE, f"--layout.shard={kind}", f"--batch.global={RANKS * accumulation}", "--batch.micro=1"]
            table[f"{name}, {accumulation} micro-steps"] = run_ranks(
                measure_stage, RANKS, load_config(overrides=options, ranks=RANKS)
            )[0]
    return {"ranks": RANKS, "unit": "bytes of all parameters", "table": table}


def measure_stage(world: World, config: RunConfig) -> dict[str, float]:
    counted = count_third_step(world, config)
    parameter_bytes = model_spec(config.model).parameter_count * 4
    wire = sum(group.wire_bytes for group in counted.rows() if group.axis != "control")
    memory = {
        kind: round(counted.memory.peak[kind] / parameter_bytes, 3) for kind in ("parameter", "gradient", "optimizer")
    }
    return memory | {"wire x n / (n - 1)": round(wire / parameter_bytes * RANKS / (RANKS - 1), 3)}
