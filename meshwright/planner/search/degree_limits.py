"""What a combination of degrees can do: its schedules, its micro-batches, its least memory."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.base.topology.layout import Layout
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.search_space import (
    ModelParallelDegrees,
    SearchSpace,
    micro_batch_sizes,
    model_parallel_degrees,
    sharded_layouts,
)
from meshwright.planner.workload.workload import Workload


def all_degrees(cache: CostCache, space: SearchSpace) -> Iterator[ModelParallelDegrees]:
    return model_parallel_degrees(cache.work, cache.cluster.device_count, cache.cluster.devices_per_node, space)


def filled_sizes(cache: CostCache, degrees: ModelParallelDegrees) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Yields the sizes of a micro-batch, in ascending order, that fill a schedule, with the schedules."""
    for micro in micro_batch_sizes(cache.work, degrees):
        if filled := cache.filled_schedules(degrees.pipeline, cache.work.global_batch // degrees.data // micro):
            yield micro, filled


def checkpoint_modes(work: Workload, space: SearchSpace) -> tuple[str, ...]:
    pin = work.pinned.get("activation_checkpoint.mode")
    return space.checkpoint_modes if pin is None else (str(pin),)


def unscheduled(cache: CostCache, degrees: ModelParallelDegrees, mode: str, offload: bool) -> list[Candidate]:
    """Returns the micro-batches of these degrees with a mode of activation checkpointing, without sharding, each with
    the first schedule that it fills.
    """
    layout = Layout(degrees.pipeline, degrees.data, 1, degrees.context, degrees.tensor, degrees.expert)
    return [
        Candidate(layout, micro, "none", mode, *filled[0], degrees.context_method, offload)
        for micro, filled in filled_sizes(cache, degrees)
    ]


def least_memory(
    cache: CostCache, degrees: ModelParallelDegrees, space: SearchSpace, sharded: tuple[str, tuple[Layout, ...]]
) -> list[Candidate]:
    """Returns the candidates of these degrees of which one has the least memory: the smallest micro-batch, the largest
    shard group, the most activation checkpointing that is supported, and the fewest and the most stages per rank (a
    rank with several stages unshards one of them at a time).
    """
    sharding, layouts = sharded
    micro, filled = next(filled_sizes(cache, degrees), (0, []))
    if not filled:
        return []
    unsplit = [row for row in filled if not SCHEDULES[row[0]].splits_backward] or filled
    candidates = []
    for schedule, stages in dict.fromkeys((filled[0], max(unsplit, key=lambda row: row[1]))):
        start = Candidate(layouts[-1], micro, sharding, "none", schedule, stages, degrees.context_method)
        start = start._replace(offload=space.offload)
        variants = [start._replace(activation_checkpoint=mode) for mode in checkpoint_modes(cache.work, space)]
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
