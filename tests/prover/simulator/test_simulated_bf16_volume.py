"""The communication volume of simulated bf16 steps equals the exact formulas, to the byte."""

from __future__ import annotations

import pytest

from meshwright.base.topology.unsupported import validate
from meshwright.planner.cost.comm_volume import CollectiveVolume, comm_volume
from meshwright.planner.cost.compare_volumes import compare_rows
from meshwright.prover.simulator.simulate import simulate_rank
from tests.kit.small_run import load_cpu_config

MODEL = (
    "--model.vocab=512 --model.width=64 --model.heads=8 --model.kv_heads=4 --model.ffn=160 --data.sequence=64"
    " --model.layers=2 --precision.compute=bf16 --layout.replicate=2"
)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("layout_options", ["--layout.shard=parameters --layout.tensor=2", "--layout.tensor=2"])
def test_partial_gradients_are_all_reduced_in_their_own_precision(layout_options, micro):
    options = [*MODEL.split(), *layout_options.split(), "--batch.global=4", f"--batch.micro={micro}"]
    config = load_cpu_config(overrides=options)
    layout, batch = validate(config)
    rank = layout.ranks - 1
    measured = [
        CollectiveVolume(row.axis, row.collective, row.message_bytes, row.wire_bytes)
        for row in simulate_rank(config, layout, batch, rank).communication
    ]
    rows = compare_rows((rank,), comm_volume(config, layout, batch, rank), measured)
    assert [str(row) for row in rows if not row.equal] == []
