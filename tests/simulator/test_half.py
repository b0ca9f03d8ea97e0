"""Traffic in bfloat16: simulated steps and formulas agree to the byte."""

from __future__ import annotations

import pytest

from meshwright.config import load_config
from meshwright.planner.exact.comm_volume import CollectiveVolume, comm_volume
from meshwright.planner.exact.compare import compare_rows
from meshwright.simulator.simulate import simulate_rank
from meshwright.topology.unsupported import validate

SHAPE = (
    "--model.vocab=512 --model.width=64 --model.heads=8 --model.kv_heads=4 --model.ffn=160 --data.sequence=64"
    " --model.layers=2 --precision.compute=bf16 --layout.replicate=2"
)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("words", ["--layout.shard=parameters --layout.tensor=2", "--layout.tensor=2"])
def test_gradients_that_are_parts_of_a_sum_meet_in_the_precision_they_have(words, micro):
    config = load_config(overrides=[*SHAPE.split(), *words.split(), "--batch.global=4", f"--batch.micro={micro}"])
    layout, batch = validate(config)
    rank = layout.ranks - 1
    found = [
        CollectiveVolume(row.axis, row.collective, row.message_bytes, row.wire_bytes)
        for row in simulate_rank(config, layout, batch, rank).traffic
    ]
    assert [
        str(pair) for pair in compare_rows((rank,), comm_volume(config, layout, batch, rank), found) if not pair.equal
    ] == []
