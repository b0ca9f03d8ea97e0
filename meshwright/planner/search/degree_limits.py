"""What a combination of degrees can do: its schedules, its micro-batches, its least memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.search_space import (
    ModelParallelDegrees,
    SearchSpace,
    fills_schedule,
    micro_batch_sizes,
    model_parallel_degrees,
    pipeline_schedules,
    sharded_layouts,
)
from meshwright.planner.workload.workload import Workload
from meshwright.topology.layout import Layout
from meshwright.topology.schedules import SCHEDULES


def all_degrees(cache: CostCache, space: SearchSpace) -> Iterator[ModelParallelDegrees]:
    return model_parallel_degrees(cache.work, cache.cluster.device_count, cache.cluster.devices_per_node, space)


def filled_schedules(cache: CostCache, degrees: ModelParallelDegrees, micro: int) -> list[tuple[str, int]]:
    """Returns the schedules for which micro-batches of this size give enough micro-batches per step."""
    micro_batches = cache.work.global_batch // degrees.data // micro
    key = degrees.pipeline, micro_batches
    if key not in cache.filled_schedules:
        schedules = [
            row
            for row in pipeline_schedules(cache.work, degrees)
            if fills_schedule(row[0], degrees.pipeline, micro_batches)
        ]
        if ("1f1b", 1) in schedules:
            schedules = [row for row in schedules if not SCHEDULES[row[0]].all_forward_first]
        cache.filled_schedules[key] = schedules
    return cache.filled_schedules[key]


def checkpoint_modes(work: Workload, space: SearchSpace) -> tuple[str, ...]:
    pin = work.pinned.get("activation_checkpoint.mode")
    return space.checkpoint_modes if pin is None else (str(pin),)


def executions(
    cache: CostCache, degrees: ModelParallelDegrees, modes: tuple[str, ...], offload: bool
) -> list[Candidate]:
    """Returns the micro-batches and schedules of these degrees with modes of activation checkpointing, without
    sharding.
    """
    layout = Layout(degrees.pipeline, degrees.data, 1, degrees.context, degrees.tensor, degrees.expert)
    return [
        Candidate(layout, micro, "none", mode, schedule, stages, degrees.context_method, offload)
        for micro in micro_batch_sizes(cache.work, degrees)
        for schedule, stages in filled_schedules(cache, degrees, micro)
        for mode in modes
    ]


def least_memory(
    cache: CostCache, degrees: ModelParallelDegrees, space: SearchSpace, sharded: tuple[str, list[Layout]]
) -> list[Candidate]:
    """Returns the candidates of these degrees of which one has the least memory: the smallest micro-batch, the largest
    shard group, the most activation checkpointing that is supported, and the fewest and the most stages per rank (a
    rank with several stages unshards one of them at a time).
    """
    sharding, layouts = sharded
    sizes = [micro for micro in micro_batch_sizes(cache.work, degrees) if filled_schedules(cache, degrees, micro)]
    if not sizes:
        return []
    filled = filled_schedules(cache, degrees, sizes[0])
    unsplit = [row for row in filled if not SCHEDULES[row[0]].splits_backward] or filled
    candidates = []
    for schedule, stages in dict.fromkeys((filled[0], max(unsplit, key=lambda row: row[1]))):
        start = Candidate(layouts[-1], sizes[0], sharding, "none", schedule, stages, degrees.context_method)
        start = replace(start, offload=space.offload)
        variants = [replace(start, activation_checkpoint=mode) for mode in checkpoint_modes(cache.work, space)]
        candidates.append(next((each for each in reversed(variants) if not cache.is_unsupported(each)), start))
    return candidates


def min_memory_candidate(cache: CostCache, space: SearchSpace | None = None) -> Candidate | None:
    """Returns the supported candidate with the least memory, whether it fits or not; None if nothing divides."""
    space = (space or SearchSpace(max_tensor_degree=cache.cluster.device_count)).of_trainer(cache.work)
    candidates: list[Candidate] = []
    for degrees in all_degrees(cache, space):
        for sharded in list(sharded_layouts(cache.work, degrees, space))[-1:]:
            smallest = least_memory(cache, degrees, space, sharded)
            candidates += [candidate for candidate in smallest if not cache.is_unsupported(candidate)]
    return min(candidates, key=lambda candidate: cache.peak_memory(candidate).total, default=None)
