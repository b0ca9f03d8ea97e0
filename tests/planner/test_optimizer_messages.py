"""The bytes of the optimizer's own collectives, by hand."""

from __future__ import annotations

import pytest

from meshwright.base.hardware.cluster import preset_cluster
from meshwright.base.topology.unsupported import validate
from meshwright.planner.cost.comm_volume import comm_volume
from meshwright.planner.cost.terms.optimizer_time import optimizer_time
from meshwright.planner.workload.planned_job import PlannedJob
from tests.kit.small_run import load_cpu_config

MODEL = ("--model.layers=1", "--model.width=16", "--model.heads=2", "--model.kv_heads=2", "--model.ffn=24")
BLOCK = 4 * 16 * 16 + 3 * 16 * 24
"""The elements of the matrices of a block."""


def rows_of(*options: str) -> list[tuple[str, int]]:
    """(collective, message bytes) of the optimizer axis, summed over ranks."""
    config = load_cpu_config(overrides=[*MODEL, "--batch.micro=1", "--batch.global=4", *options])
    layout, batch = validate(config)
    totals: dict[str, int] = {}
    for rank in range(layout.ranks):
        for row in comm_volume(config, layout, batch, rank):
            if row.axis == "optimizer":
                totals[row.collective] = totals.get(row.collective, 0) + row.message_bytes
    return sorted(totals.items())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--optimizer.kind=adamw", "--layout.replicate=2"), []),
        (("--optimizer.kind=muon", "--layout.replicate=1"), []),
        (("--optimizer.kind=muon", "--layout.replicate=2"), [("all_to_all", 2 * 4 * BLOCK)]),
        (
            ("--optimizer.kind=muon", "--layout.replicate=2", "--layout.shard=parameters"),
            [("all_to_all", 2 * 4 * BLOCK)],
        ),
        (("--optimizer.kind=muon", "--layout.replicate=2", "--layout.tensor=2"), [("all_to_all", 3 * 4 * BLOCK)]),
        (("--optimizer.kind=adafactor", "--layout.replicate=2"), []),
    ],
)
def test_bytes_of_all_ranks(options, expected):
    """Replicas receive every result in full. Shards travel to the owners, and each rank's part of the result back."""
    assert rows_of(*options) == expected


def test_adafactor_sums_rows_and_columns_of_sharded_parameters():
    [(collective, message)] = rows_of(
        "--optimizer.kind=adafactor", "--layout.replicate=2", "--layout.shard=parameters", "--model.vocab=64"
    )
    matrices = [(64, 16), (64, 16), *[(16, 16)] * 4, *[(24, 16)] * 3]
    elements = sum(rows + columns + 3 for rows, columns in matrices) + 3 * 2
    assert (collective, message) == ("all_reduce", 2 * 4 * elements)


def test_update_time_of_muon_has_its_matrix_products_and_is_divided_among_ranks():
    def update_seconds(kind: str, replicas: int) -> float:
        config = load_cpu_config(
            overrides=["--preset=gpt2-124m", f"--optimizer.kind={kind}", f"--layout.replicate={replicas}"]
        )
        return optimizer_time(PlannedJob.from_config(config, preset_cluster("h100", replicas)), 1e8)

    muon, adamw = update_seconds("muon", 1), update_seconds("adamw", 1)
    assert muon > adamw
    assert update_seconds("muon", 8) < muon
