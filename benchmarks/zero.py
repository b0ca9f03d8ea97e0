"""What sharding saves and costs: peak bytes by class and wire bytes a step, counted on real steps, in units of the
parameters' bytes.

Counts, not times: the same on every machine.
"""

from __future__ import annotations

from typing import Any

from meshwright.config import RunConfig, load_config
from meshwright.parallel.world import World
from meshwright.prover.comm_volume import count_third_step
from meshwright.testing import run_ranks
from meshwright.topology.parameter_shapes import decoder_parameter_shapes

RANKS = 4
KINDS = {"none": "ZeRO-0", "optimizer": "ZeRO-1", "gradients": "ZeRO-2", "parameters": "ZeRO-3"}
SHAPE = ["--model.width=64", "--model.layers=8", "--model.ffn=176", "--model.vocab=256", "--data.sequence=16"]


def measure() -> dict[str, Any]:
    table = {}
    for accumulation in (1, 4):
        for kind, name in KINDS.items():
            words = [*SHAPE, f"--layout.shard={kind}", f"--batch.global={RANKS * accumulation}", "--batch.micro=1"]
            table[f"{name}, {accumulation} micro-steps"] = run_ranks(
                row, RANKS, load_config(overrides=words, ranks=RANKS)
            )[0]
    return {"ranks": RANKS, "in units of": "the parameters' bytes", "table": table}


def row(world: World, config: RunConfig) -> dict[str, float]:
    counted = count_third_step(world, config)
    whole = sum(shape.local_numel() for shape in decoder_parameter_shapes(config.model)) * 4
    wire = sum(row.wire_bytes for row in counted.rows() if row.axis != "control")
    held = {kind: round(counted.memory.peak[kind] / whole, 3) for kind in ("parameter", "gradient", "optimizer")}
    return held | {"wire x n / (n - 1)": round(wire / whole * RANKS / (RANKS - 1), 3)}
