"""The search for the fastest plans: best first, by lower bounds of the step time.

The micro-batches and modes of activation checkpointing of every combination of degrees are expanded into schedules that
may fit, and these into shard groups, in the order of the lower bounds of their step times (`bounds/time_bounds.py`).
Only candidates whose bound is below the plans found so far are estimated, so that the first ones are nearly always the
best. The search skips
- what cannot be faster than the last plan of the list, than the best plan of its layout, or than a little more than the
  best plan of its family;
- candidates whose lower bound of memory does not fit, larger micro-batches of those that did not, and candidates that
  exceed the memory by as much as similar ones did;
- shard groups other than all ranks, one node, and the smallest that may fit.

tests/planner/test_search.py compares the result with an exhaustive search.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, pairwise
from math import inf
from typing import NamedTuple

from meshwright.base.topology.layout import Layout
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.search.bounds.candidate_bounds import CandidateBounds
from meshwright.planner.search.candidate import Candidate, exact_job
from meshwright.planner.search.choice import (
    PlanFamily,
    expected_seconds,
    family,
    plan_families,
    preference,
    rank_estimates,
)
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.degree_limits import all_degrees, checkpoint_modes, least_memory, unscheduled
from meshwright.planner.search.search_space import ModelParallelDegrees, SearchSpace, sharded_layouts

MAX_MEMORY_ESTIMATES = 250
"""The memory estimates of one search, as soon as it has found a plan."""
REFINED = 3
"""Plans of which all smaller micro-batches, and the same without compiled blocks, are estimated, too."""
MIN_RANKED = 5
"""The fewest families of plans that a search looks for."""
MAX_SLOWDOWN = 1.25
"""Plans that take longer than this multiple of the fastest one's step time are not looked for."""
MAX_FAILURES = 3
"""Candidates of a combination of degrees that do not fit before the search finds out whether any does."""
MIN_SIMILAR = 3
"""Candidates of one family and schedule that did not fit, from which on the smallest ratio of their memory to its lower
bound is expected of the others."""
MAX_FAMILY_SLOWDOWN = 1.02
"""The same for plans of one family: slower ones are near-duplicates of a better plan."""


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

    @property
    def families(self) -> list[PlanFamily]:
        """The ranked plans by family, in the order of their best plans."""
        return plan_families(self.ranked)


class BestPlans:
    """The best plan of every layout so far, and the step time from which on a plan is not listed."""

    def __init__(self, top: int) -> None:
        self.top, self.last_seconds = top, inf
        self.plans: dict[tuple[Layout, str], Estimate] = {}
        self.families: dict[object, float] = {}
        self.feasible: dict[Candidate, None] = {}
        """The candidates that fit, in the order in which they were found."""

    def seconds_to_beat(self, candidate: Candidate) -> float:
        """The step time from which on a candidate changes neither its layout's best plan nor the list."""
        best = self.plans.get(candidate.layout_key)
        return min(self.family_seconds(candidate), best.seconds if best else inf)

    def family_seconds(self, candidate: Candidate) -> float:
        """The step time from which on a candidate is too slow for its family, or for the list."""
        of_family = MAX_FAMILY_SLOWDOWN * self.families.get(family(candidate), inf)
        return min(self.last_seconds, of_family)

    def add(self, candidate: Candidate, plan: Estimate) -> None:
        self.feasible[candidate] = None
        key = candidate.layout_key
        if key in self.plans and preference(plan) >= preference(self.plans[key]):
            return
        self.plans[key] = plan
        own, seconds = family(candidate), expected_seconds(plan)
        self.families[own] = min(seconds, self.families.get(own, seconds))
        fastest = sorted(self.families.values())
        self.limit(fastest[0])
        self.last_seconds = min([self.last_seconds, *fastest[self.top - 1 : self.top]])

    def limit(self, seconds: float) -> None:
        """Leaves out plans that are much slower than a step time that is possible."""
        self.last_seconds = min(self.last_seconds, MAX_SLOWDOWN * seconds)


class SearchNode(NamedTuple):
    """A part of the search space; the heap orders nodes by their lower bounds, and equal ones by their numbers."""

    seconds: float
    """a lower bound of the step time"""
    number: int
    degrees: ModelParallelDegrees
    level: str
    """what of the candidate is decided: "unscheduled" (micro-batch and activation checkpointing), "execution" (the
    schedule, too) or "sharded" (everything)"""
    candidate: Candidate


class BestFirst:
    """Expands micro-batches into executions, and executions into shardings, in the order of their lower bounds."""

    def __init__(self, cache: CostCache, space: SearchSpace, best: BestPlans) -> None:
        self.cache, self.space, self.best = cache, space, best
        self.queue: list[SearchNode] = []
        self.number = count()
        self.layouts: dict[ModelParallelDegrees, list[tuple[str, tuple[Layout, ...]]]] = {}
        self.too_large: dict[object, int] = {}
        """The smallest micro-batch that does not fit in the largest shard group, by everything else."""
        self.excess: defaultdict[object, list[float]] = defaultdict(list)
        """Memory relative to its lower bound, of candidates that did not fit, by family and schedule."""
        self.failures: Counter[ModelParallelDegrees] = Counter()
        """The candidates that did not fit."""
        self.nothing_fits: set[ModelParallelDegrees] = set()
        self.searched: set[ModelParallelDegrees] = set()
        self.least_memory: list[Candidate] = []
        """Candidates with the least memory of their degrees that fit."""

    def push(self, seconds: float, degrees: ModelParallelDegrees, level: str, candidate: Candidate) -> None:
        if seconds <= self.best.last_seconds:
            heappush(self.queue, SearchNode(seconds, next(self.number), degrees, level, candidate))

    def run(self, all_degrees: list[ModelParallelDegrees], budget: int) -> None:
        """`budget` is the number of memory estimates after which a search that has found a plan ends."""
        cache, modes = self.cache, checkpoint_modes(self.cache.work, self.space)
        slower_mode = dict(pairwise(modes))
        for degrees in all_degrees:
            for each in unscheduled(cache, degrees, modes[0], self.space.offload):
                self.push(cache.least_unscheduled_seconds(each), degrees, "unscheduled", each)
        while self.queue:
            seconds, _, degrees, level, candidate = heappop(self.queue)
            spent = bool(self.best.plans) and cache.memory_estimates > budget
            if seconds > self.best.last_seconds or spent:
                break
            if level == "unscheduled":
                self.searched.add(degrees)
                if mode := slower_mode.get(candidate.activation_checkpoint):
                    slower = candidate._replace(activation_checkpoint=mode)
                    self.push(cache.least_unscheduled_seconds(slower), degrees, "unscheduled", slower)
                self.schedule(degrees, candidate)
            elif level == "execution":
                self.shard(degrees, candidate, seconds)
            else:
                self.estimate(degrees, candidate, seconds)
        if not self.best.plans:
            for each in self.least_memory:
                self.best.add(each, cache.estimate(each))

    def schedule(self, degrees: ModelParallelDegrees, micro_batch: Candidate) -> None:
        """Adds the schedules of a micro-batch that may fit with the most sharding."""
        cache, replicated = self.cache, micro_batch.layout
        for sharding, layouts in self.shardings(degrees)[-1:]:
            for schedule, stages in cache.filled_schedules(degrees.pipeline, cache.micro_batches(micro_batch)):
                execution = micro_batch._replace(schedule=schedule, stages_per_rank=stages)
                most_sharded = cache.bounds(execution, sharding, layouts[-1])
                if most_sharded.least_memory(schedule, stages, layouts[-1]) <= cache.memory_limit:
                    unsharded = cache.bounds(execution, "none", replicated)
                    self.push(unsharded.least_seconds(schedule, stages, replicated), degrees, "execution", execution)

    def shard(self, degrees: ModelParallelDegrees, execution: Candidate, seconds: float) -> None:
        """Estimates every sharding of an execution, or those whose bound is larger later."""
        schedule, stages = execution.schedule, execution.stages_per_rank
        for sharding, layouts in reversed(self.shardings(degrees)):
            if seconds > self.best.family_seconds(execution._replace(sharding=sharding, layout=layouts[-1])):
                continue
            bounds = self.cache.bounds(execution, sharding, layouts[-1])
            fitting = self.fitting_layouts(execution, bounds, layouts)
            if not fitting:
                break  # what is sharded less needs more
            for layout in self.shard_groups(fitting):
                bound = bounds.least_seconds(schedule, stages, layout)
                candidate = execution._replace(sharding=sharding, layout=layout)
                if bound > seconds:
                    self.push(bound, degrees, "sharded", candidate)
                else:
                    self.estimate(degrees, candidate, bound)

    def estimate(self, degrees: ModelParallelDegrees, candidate: Candidate, bound: float) -> None:
        """Adds a candidate to the plans if it fits, and may be one of the best."""
        cache = self.cache
        if degrees in self.nothing_fits or bound > self.best.seconds_to_beat(candidate):
            return
        key = candidate._replace(micro=1)
        similar = family(candidate), candidate.schedule, candidate.stages_per_rank
        excess = min(self.excess[similar]) if len(self.excess[similar]) >= MIN_SIMILAR else 1.0
        if cache.least_memory(candidate) * excess > cache.memory_limit:
            return
        if candidate.micro >= self.too_large.get(key, inf) or cache.is_unsupported(candidate):
            return
        if cache.fits(candidate):
            self.best.add(candidate, cache.estimate(candidate))
            return
        self.too_large[key] = candidate.micro
        if (ratio := cache.excess(candidate)) is not None:
            self.excess[similar].append(ratio)
        self.failures[degrees] += 1
        if self.failures[degrees] == MAX_FAILURES and not self.best.plans:
            self.find_least_memory(degrees)

    def shardings(self, degrees: ModelParallelDegrees) -> list[tuple[str, tuple[Layout, ...]]]:
        if degrees not in self.layouts:
            self.layouts[degrees] = list(sharded_layouts(self.cache.work, degrees, self.space))
        return self.layouts[degrees]

    def fitting_layouts(
        self, execution: Candidate, bounds: CandidateBounds, layouts: tuple[Layout, ...]
    ) -> tuple[Layout, ...]:
        """The layouts that may fit, from the smallest shard group that may fit to the largest one."""

        def may_fit(layout: Layout) -> bool:
            memory = bounds.least_memory(execution.schedule, execution.stages_per_rank, layout)
            return memory <= self.cache.memory_limit

        if may_fit(layouts[0]):
            return layouts
        if len(layouts) == 1 or not may_fit(layouts[-1]):
            return ()
        return layouts[bisect_left(layouts[:-1], True, lo=1, key=may_fit) :]

    def shard_groups(self, layouts: tuple[Layout, ...]) -> list[Layout]:
        """The layouts whose shard groups are all ranks, one node, and the smallest, in this order."""
        per_node = self.cache.cluster.devices_per_node
        within_node = [layout for layout in layouts if shard_group_ranks(layout) <= per_node]
        return list(dict.fromkeys((layouts[-1], *within_node[-1:], layouts[0])))

    def find_least_memory(self, degrees: ModelParallelDegrees) -> None:
        """Finds out whether any candidate of these degrees fits. If one does, the search needs not go on for much
        slower ones.
        """
        smallest = least_memory(self.cache, degrees, self.space, self.shardings(degrees)[-1])
        fitting = [each for each in smallest if not self.cache.is_unsupported(each) and self.cache.fits(each)]
        if not fitting:
            self.nothing_fits.add(degrees)
        for candidate in fitting:
            self.least_memory.append(candidate)
            self.best.limit(self.cache.estimate(candidate).seconds)


def shard_group_ranks(layout: Layout) -> int:
    """Consecutive ranks that a shard group spans."""
    return layout.shard * layout.context * layout.tensor


def search(
    cache: CostCache,
    space: SearchSpace | None = None,
    top: int = MIN_RANKED,
    max_memory_estimates: int = MAX_MEMORY_ESTIMATES,
) -> SearchResult:
    """Searches the plans of a workload on all devices of a cluster. If nothing fits, tensor parallelism may span nodes,
    and then optimizer state may be in host memory.
    """
    given, space = space or SearchSpace(), (space or SearchSpace()).of_trainer(cache.work)
    timed_before, memory_before = cache.timed, cache.memory_estimates
    combinations, best = list(all_degrees(cache, space)), BestPlans(top)
    best_first = BestFirst(cache, space, best)
    best_first.run(combinations, cache.memory_estimates + max_memory_estimates)
    if not best.plans and (wider := wider_space(cache, given)) is not None:
        return search(cache, wider, top, max_memory_estimates)
    for candidate in refined_candidates(cache, rank_estimates(best.plans.values())[:REFINED]):
        best.add(candidate, cache.estimate(candidate))
    ranked = rank_estimates(best.plans.values())
    first = [Candidate.from_job(plan.job) for plan in ranked[:3]]
    feasible = best.feasible | dict.fromkeys(memory_saving_variants(cache, space, first))
    ranked, exact = rank_exactly(cache, ranked, top)
    others = (cache.estimate(candidate) for candidate in feasible if candidate not in exact)
    return SearchResult(
        ranked,
        pareto_front([*(plan for plan in exact.values() if plan), *others]),
        cache.timed - timed_before,
        cache.memory_estimates - memory_before,
        len(combinations),
        len(combinations) - len(best_first.searched),
    )


def wider_space(cache: CostCache, space: SearchSpace) -> SearchSpace | None:
    """Returns the space to search if nothing fits: tensor parallelism across nodes, then offload; None after both."""
    devices = cache.cluster.device_count
    if "tensor" in space.axes and space.max_tensor_degree is None and devices > cache.cluster.devices_per_node:
        return replace(space, max_tensor_degree=devices)
    if space.offload or not space.may_offload or "optimizer.cpu_offload" in cache.work.pinned:
        return None
    return None if cache.cluster.device.is_cpu else replace(space, max_tensor_degree=None, offload=True)


def pareto_front(plans: list[Estimate]) -> list[Estimate]:
    front: list[Estimate] = []
    for plan in sorted(plans, key=lambda each: (each.seconds, each.peak_memory.total)):
        if not front or plan.peak_memory.total < front[-1].peak_memory.total:
            front.append(plan)
    return front


def rank_exactly(
    cache: CostCache, ranked: list[Estimate], top: int
) -> tuple[list[Estimate], dict[Candidate, Estimate | None]]:
    """Estimates the best plans of the first families again, with the exact formulas of their run configurations and the
    pipeline executed action by action. Plans that then do not fit are dropped, and the others take their place.

    Returns the ranked plans, and the exact estimates by candidate: None for one that was dropped.
    """
    exact: dict[Candidate, Estimate | None] = {}
    while pending := [row.best for row in plan_families(ranked)[:top] if Candidate.from_job(row.best.job) not in exact]:
        replaced = []
        for plan in ranked:
            candidate = Candidate.from_job(plan.job)
            if any(plan is each for each in pending):
                job = exact_job(cache.work, cache.cluster, candidate)
                again = estimate(job, simulate_pipeline=True, corrections=cache.corrections, quick=True)
                exact[candidate] = again if again.peak_memory.total <= cache.memory_limit else None
                replaced += [again] if exact[candidate] else []
            else:
                replaced.append(plan)
        ranked = rank_estimates(replaced)
    return ranked, exact


def refined_candidates(cache: CostCache, plans: Iterable[Estimate]) -> Iterator[Candidate]:
    """Yields the first plans with smaller micro-batches and without compiled blocks. Smaller micro-batches are rarely
    faster: where the loss is computed in fewer chunks, or where matrix products divide better over the multiprocessors.
    """
    for plan in plans:
        candidate, local = Candidate.from_job(plan.job), plan.job.batch.micro * plan.job.batch.accumulation
        variants = []
        if candidate.layout.pipeline == 1 and "batch.micro" not in cache.work.pinned:
            variants = [candidate._replace(micro=size) for size in range(1, candidate.micro) if local % size == 0]
        if cache.work.trainer is None and "compile.enabled" not in cache.work.pinned and candidate.compile is None:
            variants.append(candidate._replace(compile=False))
        for variant in variants:
            if not cache.is_unsupported(variant) and cache.fits(variant):
                yield variant


def memory_saving_variants(cache: CostCache, space: SearchSpace, first: list[Candidate]) -> Iterator[Candidate]:
    """Yields the first plans with more activation checkpointing and smaller micro-batches: slower, with less memory."""
    for candidate in first:
        sizes = {candidate.micro} if "batch.micro" in cache.work.pinned else {candidate.micro, 1}
        for mode in checkpoint_modes(cache.work, space):
            for micro in sizes:
                variant = candidate._replace(micro=micro, activation_checkpoint=mode)
                if not cache.is_unsupported(variant) and cache.fits(variant):
                    yield variant
