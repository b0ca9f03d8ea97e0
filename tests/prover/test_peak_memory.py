"""The peak memory that the planner predicts is within five per cent of the measured one, on every rank of every layout.

With expert parallelism the number of tokens per rank depends on the data, while the formulas assume an even load: there
the mean over the ranks of an expert group is compared.
"""

from __future__ import annotations

from functools import cache

import pytest
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from meshwright.base.config import RunConfig
from meshwright.base.topology.unsupported import validate
from meshwright.core.launch.ranks import run_ranks
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.workload.planned_job import PlannedJob
from tests.kit.hybrid_layouts import HYBRIDS, MACHINE, balanced_config
from tests.kit.step_harness import count_third_step

MAX_RELATIVE_ERROR = 0.05


def measure_peaks(world, configs: list[RunConfig]) -> list[int]:
    peaks = []
    for config in configs:
        _clear_sharding_prop_cache()
        peaks.append(count_third_step(world, config).memory.peak_total)
    return peaks


@cache
def measure_all(rows: tuple[str, ...], ranks: int) -> dict[str, list[int]]:
    """The peak memory of each rank, for all layouts with this number of ranks, from one launch."""
    configs = {row: config for row in rows if validate(config := balanced_config(row))[0].ranks == ranks}
    by_rank = run_ranks(measure_peaks, ranks, list(configs.values()), timeout=230.0)
    return {row: [peaks[index] for peaks in by_rank] for index, row in enumerate(configs)}


def relative_errors(row: str, rows: tuple[str, ...]) -> list[float]:
    config = balanced_config(row)
    layout, _ = validate(config)
    measured, predicted = measure_all(rows, layout.ranks)[row], estimate_memory(PlannedJob.from_config(config, MACHINE))
    errors = []
    for rank in range(layout.ranks):
        group = layout.group(rank, "expert") if layout.expert > 1 else [rank]
        mean = sum(measured[other] for other in group) / len(group)
        errors.append(predicted[layout.coordinates(rank)["pipeline"]].tensors / mean - 1)
    return errors


COVERING = (
    "replicate=1 accumulation=1",
    "replicate=1 accumulation=1 precision=bf16",
    "replicate=1 accumulation=1 precision=fp64",
    "replicate=1 precision=bf16 weights=bf16",
    "replicate=1 recompute=full layers=4",
    "replicate=1 recompute=selective layers=4 precision=bf16",
    "replicate=1 experts=4 experts_shared=1",
    "replicate=1 separator=0",
    "replicate=1 family=mistral window=32",
    "replicate=2 shard=parameters family=mistral window=32 precision=bf16",
    "replicate=1 lora=4",
    "replicate=1 lora=4 precision=bf16 weights=bf16",
    "replicate=1 lora=4 recompute=selective layers=4 precision=bf16",
    "replicate=1 lora=4 experts=4 experts_shared=1",
    "replicate=2",
    "replicate=2 lora=4 shard=parameters recompute=full layers=4 precision=bf16 weights=bf16",
    "replicate=2 lora=4 shard=gradients",
    "tensor=2 lora=4",
    "pipeline=2 lora=4 schedule=zbv",
    "replicate=2 precision=bf16 weights=bf16",
    "replicate=2 precision=bf16 weights=bf16 accumulation=1",
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
def test_predicted_peak_memory_matches_measurement(row):
    assert max(map(abs, relative_errors(row, COVERING))) < MAX_RELATIVE_ERROR


LAUNCHES = {row: tuple(HYBRIDS[index // 15 * 15 : index // 15 * 15 + 15]) for index, row in enumerate(HYBRIDS)}
"""Fifteen layouts per launch, so that it ends within the timeout."""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", HYBRIDS)
def test_predicted_peak_memory_of_every_hybrid_layout_matches_measurement(row):
    errors = relative_errors(row, LAUNCHES[row])
    print(row, *(f"{error:+.1%}" for error in errors))
    assert max(map(abs, errors)) < MAX_RELATIVE_ERROR
