"""The search for the fastest plans: ranks the candidates that fit by step time without estimating all of them.

Step time is estimated first, and memory only for candidates that would rank among the first. The search skips
- degrees none of whose candidates, given unlimited memory, is as fast as the last plan of the list;
- more activation checkpointing than a candidate needs to fit: it costs time and saves nothing but memory;
- smaller micro-batches, if larger ones fit and there is no pipeline to fill;
- shard groups other than all ranks, one node, and the smallest that fit with and without activation checkpointing.

tests/planner/test_search.py compares the result with an exhaustive search.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from math import log

from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.search.candidate import Candidate, exact_job
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

MAX_MEMORY_ESTIMATES = 250
"""The memory estimates of one search in addition to the first ones of each combination of degrees."""
REFINED = 3
"""Plans of which all smaller micro-batches are estimated, too."""
MARGIN = 1.05
"""Degrees are searched if their optimistic step time is at most this multiple of the last plan of the list."""
TIE_TOLERANCE = 0.01
"""Plans whose step times differ by at most this fraction count as equally fast."""
MIN_RANKED = 8
"""The fewest plans that a search ranks."""


@dataclass(frozen=True)
class SearchResult:
    ranked: list[Estimate]
    """The best plan of every layout that fits and was searched, in the order of `rank_estimates`."""
    pareto_front: list[Estimate]
    """The plans that no other plan beats in both step time and memory, fastest first."""
    timed: int
    """The candidates whose step time was estimated."""
    memory_estimates: int
    """The candidates whose memory was estimated."""
    degrees: int
    """The combinations of model-parallel degrees that divide the workload."""
    degrees_skipped: int
    """The combinations that were not searched: too slow given unlimited memory, nothing fits, or the budget of memory
    estimates was spent.
    """


class BestByLayout:
    """The best plan of every layout so far, and the step time of the last plan in a list of `top`."""

    def __init__(self, top: int) -> None:
        self.top, self.last_seconds = top, float("inf")
        self.plans: dict[tuple[Layout, str], Estimate] = {}

    def seconds_to_beat(self, candidate: Candidate) -> float:
        """The step time from which on a candidate changes neither its layout's best plan nor the list."""
        best = self.plans.get(candidate.layout_key)
        return min(self.last_seconds, best.seconds if best else self.last_seconds)

    def add(self, plan: Estimate) -> None:
        key = Candidate.from_job(plan.job).layout_key
        if key in self.plans and preference(plan) >= preference(self.plans[key]):
            return
        self.plans[key] = plan
        if plan.seconds < self.last_seconds and len(self.plans) >= self.top:
            self.last_seconds = sorted(best.seconds for best in self.plans.values())[self.top - 1]


def search(
    cache: CostCache,
    space: SearchSpace | None = None,
    top: int = MIN_RANKED,
    max_memory_estimates: int = MAX_MEMORY_ESTIMATES,
) -> SearchResult:
    """Searches the plans of a workload on all devices of a cluster.

    One feasible candidate is estimated for each combination of degrees, in the order of their optimistic step times;
    then the combinations are searched completely, in the order of those first estimates.
    """
    space = space or SearchSpace()
    timed_before, memory_before = cache.timed, cache.memory_estimates
    all_combinations = [(optimistic_seconds(cache, degrees, space), degrees) for degrees in all_degrees(cache, space)]
    best = BestByLayout(top)
    started: list[tuple[Estimate, float, ModelParallelDegrees]] = []
    for optimistic, degrees in sorted(all_combinations, key=lambda row: row[0]):
        if optimistic <= MARGIN * best.last_seconds:
            first = first_feasible(cache, degrees, space)
            if first is not None:
                started.append((cache.estimate(first), optimistic, degrees))
                best.add(started[-1][0])
    if not started and "tensor" in space.axes and space.max_tensor_degree is None:
        # Nothing fits with tensor parallelism inside a node: let it span nodes.
        wider = replace(space, max_tensor_degree=cache.cluster.device_count)
        return search(cache, wider, top, max_memory_estimates)
    feasible = {Candidate.from_job(plan.job) for plan, *_ in started}
    budget = cache.memory_estimates + max_memory_estimates
    skipped = len(all_combinations) - len(started)
    for _, optimistic, degrees in sorted(started, key=lambda row: row[0].seconds):
        if optimistic > MARGIN * best.last_seconds or cache.memory_estimates > budget:
            skipped += 1
            continue
        for candidate in feasible_candidates(cache, degrees, space, best):
            feasible.add(candidate)
            best.add(cache.estimate(candidate))
    for candidate in smaller_micro_batches(cache, rank_estimates(best.plans.values())[:REFINED]):
        feasible.add(candidate)
        best.add(cache.estimate(candidate))
    ranked = rank_estimates(best.plans.values())
    feasible |= set(memory_saving_variants(cache, space, [Candidate.from_job(plan.job) for plan in ranked[:3]]))
    exact = reestimate_exactly(cache, ranked[:top])
    known = {Candidate.from_job(plan.job) for plan in ranked[:top]}
    front = pareto_front([*exact, *(cache.estimate(candidate) for candidate in feasible - known)])
    return SearchResult(
        rank_estimates(exact) + ranked[top:],
        front,
        cache.timed - timed_before,
        cache.memory_estimates - memory_before,
        len(all_combinations),
        skipped,
    )


def all_degrees(cache: CostCache, space: SearchSpace) -> Iterator[ModelParallelDegrees]:
    return model_parallel_degrees(cache.work, cache.cluster.device_count, cache.cluster.devices_per_node, space)


def first_feasible(cache: CostCache, degrees: ModelParallelDegrees, space: SearchSpace) -> Candidate | None:
    """Returns a candidate that is likely to be among the best: the least checkpointing, then the least sharding."""
    sizes = [micro for micro in micro_batch_sizes(cache.work, degrees) if filled_schedules(cache, degrees, micro)]
    shardings = list(sharded_layouts(cache.work, degrees, space))
    for mode in checkpoint_modes(cache.work, space) if sizes and shardings else ():
        filled = filled_schedules(cache, degrees, sizes[0])
        schedules = [row for row in filled if not SCHEDULES[row[0]].splits_backward] or filled
        # More stages per rank need more memory, so the fewest are the second attempt.
        for schedule, stages in dict.fromkeys((max(schedules, key=lambda row: row[1]), schedules[0])):
            candidates = [
                Candidate(layouts[-1], sizes[0], sharding, mode, schedule, stages, degrees.context_method)
                for sharding, layouts in shardings
            ]
            supported = [candidate for candidate in candidates if not cache.is_unsupported(candidate)]
            if not supported or not cache.fits(supported[-1]):  # the most sharded: if it does not fit, none does
                continue
            start = next(candidate for candidate in supported if cache.fits(candidate))
            if degrees.pipeline > 1:
                return start
            return [start, *takewhile(cache.fits, (replace(start, micro=micro) for micro in sizes[1:]))][-1]
    return None


def complexity(plan: Estimate) -> int:
    """Counts the parallel axes and techniques of a plan; a simpler plan wins a tie."""
    job = plan.job
    sharding = (job.sharding != "none") + (job.sharding == "parameters") + (job.layout.replicate > 1 < job.layout.shard)
    techniques = (job.activation_checkpoint != "none") + (job.stages_per_rank > 1)
    return 2 * len(job.layout.active_axes) + sharding + techniques


def preference(plan: Estimate) -> tuple[int, int, float]:
    """The sort key of plans of one layout: the fastest, then the simplest of tied plans, then the least memory."""
    return round(log(plan.seconds) / TIE_TOLERANCE), complexity(plan), plan.peak_memory.total


def rank_estimates(plans: Iterable[Estimate]) -> list[Estimate]:
    """Sorts by step time, except that the simplest plan within the tie tolerance of the fastest comes first."""
    ranked = sorted(plans, key=lambda plan: (plan.seconds, complexity(plan), plan.peak_memory.total))
    tied = [plan for plan in ranked if plan.seconds <= (1 + TIE_TOLERANCE) * ranked[0].seconds]
    first = min(tied, key=lambda plan: (complexity(plan), plan.seconds), default=None)
    return [first, *(plan for plan in ranked if plan is not first)] if first else []


def pareto_front(plans: list[Estimate]) -> list[Estimate]:
    front: list[Estimate] = []
    for plan in sorted(plans, key=lambda each: (each.seconds, each.peak_memory.total)):
        if not front or plan.peak_memory.total < front[-1].peak_memory.total:
            front.append(plan)
    return front


def reestimate_exactly(cache: CostCache, plans: list[Estimate]) -> list[Estimate]:
    """Estimates plans again by the exact formulas of their run configurations; drops those that then do not fit."""
    if cache.work.base_config is None:
        return plans
    jobs = [exact_job(cache.work, cache.cluster, Candidate.from_job(plan.job)) for plan in plans]
    exact = (estimate(job, simulate_pipeline=True, corrections=cache.corrections) for job in jobs)
    return [plan for plan in exact if plan.fits]


def optimistic_seconds(cache: CostCache, degrees: ModelParallelDegrees, space: SearchSpace) -> float:
    """Returns the best step time of a few candidates, given unlimited memory.

    They have the least and the most sharding, the smallest and the largest micro-batches, and the schedules with the
    smallest bubbles.
    """
    sizes = [micro for micro in micro_batch_sizes(cache.work, degrees) if filled_schedules(cache, degrees, micro)]
    shardings = list(sharded_layouts(cache.work, degrees, space))
    if not sizes or not shardings:
        return float("inf")
    mode = checkpoint_modes(cache.work, space)[0]
    step_times = []
    for micro in {sizes[0], sizes[-1]} if degrees.pipeline > 1 else sizes[-1:]:
        schedules = filled_schedules(cache, degrees, micro)
        split = [row for row in schedules if SCHEDULES[row[0]].splits_backward]
        unsplit = [row for row in schedules if not SCHEDULES[row[0]].splits_backward] or split
        for schedule, stages in {max(unsplit, key=lambda row: row[1]), (split or unsplit)[-1]}:
            for sharding, layouts in {shardings[0][0]: shardings[0], shardings[-1][0]: shardings[-1]}.values():
                candidate = Candidate(layouts[-1], micro, sharding, mode, schedule, stages, degrees.context_method)
                if not cache.is_unsupported(candidate):
                    step_times.append(cache.optimistic_estimate(candidate).seconds)
    return min(step_times, default=0.0)


def filled_schedules(cache: CostCache, degrees: ModelParallelDegrees, micro: int) -> list[tuple[str, int]]:
    """Returns the schedules for which micro-batches of this size give enough micro-batches per step."""
    micro_batches = cache.work.global_batch // degrees.data // micro
    schedules = [
        row
        for row in pipeline_schedules(cache.work, degrees)
        if fills_schedule(row[0], degrees.pipeline, micro_batches)
    ]
    if ("1f1b", 1) not in schedules:
        return schedules
    return [row for row in schedules if not SCHEDULES[row[0]].all_forward_first]


def feasible_candidates(
    cache: CostCache, degrees: ModelParallelDegrees, space: SearchSpace, best: BestByLayout
) -> Iterator[Candidate]:
    """Yields the supported candidates that fit and may improve on the best plans so far.

    The most sharded layouts come first: a micro-batch that does not fit there fits nowhere.
    """
    modes = checkpoint_modes(cache.work, space)
    too_large: set[tuple[str, int, int, str]] = set()
    for sharding, all_layouts in reversed(list(sharded_layouts(cache.work, degrees, space))):
        for layout in reversed(shard_group_layouts(cache, degrees, space, sharding, all_layouts)):
            for schedule, stages in pipeline_schedules(cache.work, degrees):
                fitting: list[Candidate] = []
                level = 0
                for micro in micro_batch_sizes(cache.work, degrees):
                    if (schedule, stages) not in filled_schedules(cache, degrees, micro):
                        continue
                    candidate = Candidate(
                        layout, micro, sharding, modes[level], schedule, stages, degrees.context_method
                    )
                    if cache.optimistic_estimate(candidate).seconds > best.seconds_to_beat(candidate):
                        continue
                    fits = with_least_recomputation(cache, candidate, modes[level:], too_large)
                    if fits is None:
                        break
                    level = modes.index(fits.activation_checkpoint)
                    fitting.append(fits)
                yield from fitting if degrees.pipeline > 1 else smallest_and_largest(fitting)


def checkpoint_modes(work: Workload, space: SearchSpace) -> tuple[str, ...]:
    pin = work.pinned.get("activation_checkpoint.mode")
    return space.checkpoint_modes if pin is None else (str(pin),)


def with_least_recomputation(
    cache: CostCache, candidate: Candidate, modes: tuple[str, ...], too_large: set[tuple[str, int, int, str]]
) -> Candidate | None:
    """Returns the candidate with the first mode of activation checkpointing that fits."""
    for mode in modes:
        attempt = replace(candidate, activation_checkpoint=mode)
        key = (candidate.schedule, candidate.stages_per_rank, candidate.micro, mode)
        if key in too_large or cache.is_unsupported(attempt):
            continue
        if cache.fits(attempt):
            return attempt
        too_large.add(key)
    return None


def smallest_and_largest(candidates: list[Candidate]) -> list[Candidate]:
    """Keeps the smallest and the largest micro-batch of each mode of activation checkpointing.

    Without a pipeline the largest is the fastest; the smallest may be as fast and needs less memory.
    """
    kept: dict[tuple[str, str], Candidate] = {}
    for candidate in candidates:
        kept.setdefault((candidate.activation_checkpoint, "smallest"), candidate)
        kept[candidate.activation_checkpoint, "largest"] = candidate
    return list(dict.fromkeys(kept.values()))


def shard_group_layouts(
    cache: CostCache, degrees: ModelParallelDegrees, space: SearchSpace, sharding: str, layouts: list[Layout]
) -> list[Layout]:
    """Keeps the shard groups of all ranks, of one node, and the smallest that fit with the most and the least
    activation checkpointing.
    """
    if len(layouts) < 3:
        return layouts
    sizes = micro_batch_sizes(cache.work, degrees)
    micro = next((size for size in sizes if any(filled_schedules(cache, degrees, size))), 1)
    schedule, stages = (filled_schedules(cache, degrees, micro) or pipeline_schedules(cache.work, degrees))[0]
    per_node = cache.cluster.devices_per_node
    within_node = [layout for layout in layouts if layout.shard * layout.context * layout.tensor <= per_node]
    kept = {layouts[-1], *within_node[-1:]}
    modes = checkpoint_modes(cache.work, space)
    for mode in {modes[0], modes[-1]}:

        def fits(layout: Layout, mode: str = mode) -> bool:
            return cache.fits(Candidate(layout, micro, sharding, mode, schedule, stages, degrees.context_method))

        smallest = bisect_left(layouts, True, key=fits)
        if smallest < len(layouts):
            kept.add(layouts[smallest])
    return [layout for layout in layouts if layout in kept]


def smaller_micro_batches(cache: CostCache, plans: Iterable[Estimate]) -> Iterator[Candidate]:
    """Yields the first plans with smaller micro-batches. They are rarely faster: where the loss is computed in fewer
    chunks, or where matrix products divide better over the multiprocessors.
    """
    if "batch.micro" in cache.work.pinned:
        return
    for plan in plans:
        candidate, local = Candidate.from_job(plan.job), plan.job.batch.micro * plan.job.batch.accumulation
        if candidate.layout.pipeline == 1:
            for micro in (size for size in range(1, candidate.micro) if local % size == 0):
                variant = replace(candidate, micro=micro)
                if not cache.is_unsupported(variant) and cache.fits(variant):
                    yield variant


def memory_saving_variants(cache: CostCache, space: SearchSpace, first: list[Candidate]) -> Iterator[Candidate]:
    """Yields the first plans with more activation checkpointing and smaller micro-batches: slower, with less memory."""
    for candidate in first:
        sizes = {candidate.micro} if "batch.micro" in cache.work.pinned else {candidate.micro, 1}
        for mode in checkpoint_modes(cache.work, space):
            for micro in sizes:
                variant = replace(candidate, micro=micro, activation_checkpoint=mode)
                if not cache.is_unsupported(variant) and cache.fits(variant):
                    yield variant


def min_memory_candidate(cache: CostCache, space: SearchSpace | None = None) -> Candidate | None:
    """Returns the supported candidate with the least memory, whether it fits or not; None if nothing divides."""
    space = space or SearchSpace(max_tensor_degree=cache.cluster.device_count)
    candidates: list[Candidate] = []
    for degrees in all_degrees(cache, space):
        sizes = [micro for micro in micro_batch_sizes(cache.work, degrees) if filled_schedules(cache, degrees, micro)]
        shardings = list(sharded_layouts(cache.work, degrees, space))
        if not sizes or not shardings:
            continue
        sharding, layouts = shardings[-1]
        schedule, stages = filled_schedules(cache, degrees, sizes[0])[0]
        start = Candidate(layouts[-1], sizes[0], sharding, "none", schedule, stages, degrees.context_method)
        modes = reversed(checkpoint_modes(cache.work, space))
        variants = (replace(start, activation_checkpoint=mode) for mode in modes)
        candidates += [variant for variant in variants if not cache.is_unsupported(variant)][:1]
    return min(candidates, key=lambda candidate: cache.peak_memory(candidate).total, default=None)
