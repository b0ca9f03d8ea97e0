"""The peak of a step as the planner says it, against the tensor ledger of a real step, on every layout of the matrix.

Within five per cent on every rank. Where experts are divided, how many rows come to a rank depends on the data, and the
formulas are of an even load: there it is the mean over the ranks that share them.
"""

from __future__ import annotations

from functools import cache

import pytest
from hybrids import HYBRIDS, MACHINE, in_proportion
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from meshwright.config import RunConfig
from meshwright.launch.ranks import run_ranks
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.prover.comm_volume import count_third_step
from meshwright.topology.unsupported import validate

LARGEST_ERROR = 0.05


def peaks(world, configs: list[RunConfig]) -> list[int]:
    found = []
    for config in configs:
        _clear_sharding_prop_cache()
        found.append(count_third_step(world, config).memory.peak_total)
    return found


@cache
def launched(rows: tuple[str, ...], ranks: int) -> dict[str, list[int]]:
    """All that have so many ranks, in one launch: by row, what each rank held."""
    configs = {row: config for row in rows if validate(config := in_proportion(row))[0].ranks == ranks}
    found = run_ranks(peaks, ranks, list(configs.values()), timeout=230.0)
    return {row: [of_rank[index] for of_rank in found] for index, row in enumerate(configs)}


def errors(row: str, rows: tuple[str, ...]) -> list[float]:
    config = in_proportion(row)
    layout, _ = validate(config)
    measured, said = launched(rows, layout.ranks)[row], estimate_memory(PlannedJob.from_config(config, MACHINE))
    found = []
    for rank in range(layout.ranks):
        group = layout.group(rank, "expert") if layout.expert > 1 else [rank]
        mean = sum(measured[other] for other in group) / len(group)
        found.append(said[layout.coordinates(rank)["pipeline"]].tensors / mean - 1)
    return found


COVERING = (
    "replicate=1 accumulation=1",
    "replicate=1 accumulation=1 precision=bf16",
    "replicate=1 accumulation=1 precision=fp64",
    "replicate=1 recompute=full layers=4",
    "replicate=1 recompute=selective layers=4 precision=bf16",
    "replicate=1 experts=4 experts_shared=1",
    "replicate=1 separator=0",
    "replicate=2",
    "replicate=2 shard=optimizer precision=bf16",
    "replicate=2 shard=parameters recompute=full layers=4",
    "tensor=2 recompute=selective",
    "tensor=2 experts=4 experts_shared=1 precision=bf16",
    "pipeline=2 schedule=gpipe",
    "pipeline=2 schedule=zbv",
    "pipeline=2 schedule=interleaved layers=4 separator=0 recompute=selective",
    "context=2 method=ring heads=8",
    "replicate=2 expert=2 experts=8",
    "replicate=2 shard=parameters pipeline=2 recompute=full",
    "tensor=2 pipeline=2 schedule=zero-bubble",
    "replicate=2 shard=gradients context=2 method=all-to-all",
    "replicate=2 tensor=2 expert=2 experts=4 experts_shared=1",
)


@pytest.mark.parametrize("row", COVERING)
def test_the_peak_of_a_covering_layout_is_the_planners(row):
    assert max(map(abs, errors(row, COVERING))) < LARGEST_ERROR


PARTS = {row: tuple(HYBRIDS[index // 15 * 15 : index // 15 * 15 + 15]) for index, row in enumerate(HYBRIDS)}
"""So many in one launch that it ends in time."""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", HYBRIDS)
def test_the_peak_of_every_hybrid_is_the_planners(row):
    found = errors(row, PARTS[row])
    print(row, *(f"{error:+.1%}" for error in found))
    assert max(map(abs, found)) < LARGEST_ERROR
