"""The best ways to spread a step: every way that fits, the quickest first, without estimating them all; torch-free.

Time is asked first, memory only of what would be among the first. What is left out would not be:
- degrees of which no plan, were there room for it, is as quick as the last plan of the list;
- recomputation, where less of it fits: it takes time and gives memory alone;
- passes of fewer samples, where larger ones fit and no pipeline waits for them;
- groups of shards other than all ranks, a node, and the smallest that fits with and without recomputation.

tests/plan/test_search.py holds the result against that of trying everything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from math import log

from meshwright.planner.calibration.corrections import corrections_for
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.estimate import Estimate, MemoryEstimate
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.search.candidate import Candidate, candidate_job, exact_job, validation_error
from meshwright.planner.search.search_space import (
    ModelParallelDegrees,
    SearchSpace,
    fills_schedule,
    micro_batch_sizes,
    model_parallel_degrees,
    pipeline_schedules,
    sharded_layouts,
)
from meshwright.planner.workload.trainer_profiles import MESHWRIGHT
from meshwright.planner.workload.workload import Workload
from meshwright.topology.layout import Layout
from meshwright.topology.schedules import SCHEDULES

MAX_MEMORY_ESTIMATES = 250
"""Plans of one search that are weighed after one of every frame, in the frames whose plan was quickest."""
MARGIN = 1.05
"""A frame is looked into where the best of its few sketches takes so many times the last of the list, or less."""
TIE_TOLERANCE = 0.01
"""Plans are as quick as each other within this."""
MIN_RANKED = 8
"""Plans in the list, at least."""


@dataclass(frozen=True)
class SearchResult:
    ranked: list[Estimate]
    """of every layout that fits and was looked into its best; see in_order"""
    front: list[Estimate]
    """those of all that fit than which none is both quicker and lighter, quickest first"""
    estimates: int
    """steps that were timed"""
    weighed: int
    """jobs whose memory was asked for"""
    degrees: int
    """ways to cut the model"""
    left_out: int
    """of these, not looked into: their arithmetic alone takes longer, nothing fits, or enough was weighed"""


class CostCache:
    """What was estimated of one workload on one cluster, each thing once."""

    def __init__(self, work: Workload, cluster: Cluster) -> None:
        self.work, self.cluster, self.lessons = work, cluster, corrections_for(cluster)
        self.weights: dict[Candidate, list[MemoryEstimate]] = {}
        self.heavy: dict[Candidate, MemoryEstimate] = {}
        self.step_times: dict[Candidate, Estimate] = {}
        self.estimates_by_candidate: dict[Candidate, Estimate] = {}
        self.unsupported_by_candidate: dict[Candidate, bool] = {}

    @property
    def counts(self) -> tuple[int, int]:
        """(plans timed, plans weighed)"""
        return len({*self.step_times, *self.estimates_by_candidate}), len(self.weights)

    def weigh(self, choice: Candidate) -> list[MemoryEstimate]:
        if choice not in self.weights:
            job = candidate_job(self.work, self.cluster, choice)
            self.weights[choice] = self.lessons.correct_memory(job, estimate_memory(job, quick=True))
        return self.weights[choice]

    def peak_memory(self, choice: Candidate) -> MemoryEstimate:
        if choice not in self.heavy:
            self.heavy[choice] = max(self.weigh(choice), key=lambda stage: stage.total)
        return self.heavy[choice]

    def fits(self, choice: Candidate) -> bool:
        """Weighed only where what is held between steps would have room."""
        capacity = self.cluster.device.memory
        return min_state_bytes(self.work, choice) <= capacity and self.peak_memory(choice).total <= capacity

    def unweighed(self, choice: Candidate) -> Estimate:
        """Its seconds, whether it fits or not."""
        if choice not in self.step_times:
            self.step_times[choice] = estimate_step(candidate_job(self.work, self.cluster, choice), [])
        return self.step_times[choice]

    def time(self, choice: Candidate) -> Estimate:
        if choice not in self.estimates_by_candidate:
            found = estimate_step(candidate_job(self.work, self.cluster, choice), self.weigh(choice))
            self.estimates_by_candidate[choice] = self.lessons.correct_estimate(found)
        return self.estimates_by_candidate[choice]

    def refused(self, choice: Candidate) -> bool:
        if choice not in self.unsupported_by_candidate:
            self.unsupported_by_candidate[choice] = validation_error(self.work, choice) is not None
        return self.unsupported_by_candidate[choice]


def min_state_bytes(work: Workload, choice: Candidate) -> float:
    """Bytes of parameters, gradients and optimizer that a rank has at least: of an even division of everything."""
    model, layout, stack = work.model, choice.layout, MESHWRIGHT
    banks = model.moe_layers * model.experts * model.expert_parameters
    numbers = (model.parameters - banks + banks / layout.expert) / layout.tensor / layout.pipeline
    over = layout.shard * layout.context if choice.sharding != "none" else 1
    state = 0.0 if work.base_config is not None and work.base_config.optimizer.cpu_offload else stack.optimizer_bytes
    divided = {"optimizer": state, "gradients": state + stack.gradient_bytes}.get(choice.sharding, 0.0)
    whole = stack.parameter_bytes + stack.gradient_bytes + state
    divided = whole if choice.sharding == "parameters" else divided
    return numbers * (whole - divided + divided / over)


class BestByLayout:
    """The best plan of every layout so far, and the seconds of the last that the list has room for."""

    def __init__(self, top: int) -> None:
        self.top, self.last = top, float("inf")
        self.plans: dict[tuple[Layout, str], Estimate] = {}

    def to_beat(self, choice: Candidate) -> float:
        """Seconds beyond which a choice changes nothing: of its layout's best, and of the last of the list."""
        known = self.plans.get(choice.layout_key)
        return min(self.last, known.seconds if known else self.last)

    def keep(self, found: Estimate) -> None:
        family = Candidate.of(found.job).layout_key
        if family in self.plans and preference(found) >= preference(self.plans[family]):
            return
        self.plans[family] = found
        if found.seconds < self.last and len(self.plans) >= self.top:
            self.last = sorted(each.seconds for each in self.plans.values())[self.top - 1]


def search(
    desk: CostCache, space: SearchSpace | None = None, top: int = MIN_RANKED, most: int = MAX_MEMORY_ESTIMATES
) -> SearchResult:
    """Of a workload on all devices of a cluster. Frames are taken in the order of what they promise, whether it fits or
    not, and of each one plan is made at once; then those whose plan is quick are looked into first.
    """
    space = space or SearchSpace()
    before = desk.counts
    every = [(optimistic_seconds(desk, frame, space), frame) for frame in all_degrees(desk, space)]
    best = BestByLayout(top)
    begun: list[tuple[Estimate, float, ModelParallelDegrees]] = []
    for promised, frame in sorted(every, key=lambda row: row[0]):
        if promised <= MARGIN * best.last and (choice := first_feasible(desk, frame, space)) is not None:
            begun.append((desk.time(choice), promised, frame))
            best.keep(begun[-1][0])
    if not begun and "tensor" in space.axes and space.tensor is None:
        return search(desk, replace(space, tensor=desk.cluster.device_count), top, most)  # beyond a node, then
    tried = {Candidate.of(found.job) for found, *_ in begun}
    enough, left = len(desk.weights) + most, len(every) - len(begun)
    for _, promised, frame in sorted(begun, key=lambda row: row[0].seconds):
        if promised > MARGIN * best.last or len(desk.weights) > enough:
            left += 1
            continue
        for choice in feasible_candidates(desk, frame, space, best):
            tried.add(choice)
            best.keep(desk.time(choice))
    ranked = rank_estimates(best.plans.values())
    tried |= set(memory_saving_variants(desk, space, [Candidate.of(found.job) for found in ranked[:3]]))
    first = reestimate_exactly(desk, ranked[:top])
    known = {Candidate.of(found.job) for found in ranked[:top]}
    front = pareto_front([*first, *(desk.time(choice) for choice in tried - known)])
    return SearchResult(
        rank_estimates(first) + ranked[top:],
        front,
        desk.counts[0] - before[0],
        desk.counts[1] - before[1],
        len(every),
        left,
    )


def first_feasible(desk: CostCache, frame: ModelParallelDegrees, space: SearchSpace) -> Candidate | None:
    """A plan of a frame that is likely to be among its best: the least that fits is recomputed, then divided."""
    sizes = [micro for micro in micro_batch_sizes(desk.work, frame) if filled_schedules(desk, frame, micro)]
    kinds = list(sharded_layouts(desk.work, frame, space))
    for recompute in checkpoint_modes(desk.work, space) if sizes and kinds else ():
        rows = [
            row for row in filled_schedules(desk, frame, sizes[0]) if not SCHEDULES[row[0]].splits_backward
        ] or filled_schedules(desk, frame, sizes[0])
        for kind, each in dict.fromkeys((max(rows, key=lambda row: row[1]), rows[0])):  # many stages hold more
            tried = [
                Candidate(options[-1], sizes[0], sharding, recompute, kind, each, frame.method)
                for sharding, options in kinds
            ]
            allowed = [choice for choice in tried if not desk.refused(choice)]
            if not allowed or not desk.fits(allowed[-1]):  # where the most divided does not, no other does
                continue
            start = next(choice for choice in allowed if desk.fits(choice))
            if frame.pipeline > 1:
                return start
            return [start, *takewhile(desk.fits, (replace(start, micro=micro) for micro in sizes[1:]))][-1]
    return None


def all_degrees(desk: CostCache, space: SearchSpace) -> Iterator[ModelParallelDegrees]:
    return model_parallel_degrees(desk.work, desk.cluster.device_count, desk.cluster.devices_per_node, space)


def complexity(found: Estimate) -> int:
    """How much there is to a plan."""
    job = found.job
    shards = (job.sharding != "none") + (job.sharding == "parameters") + (job.layout.replicate > 1 < job.layout.shard)
    return 2 * len(job.layout.active_axes) + shards + (job.activation_checkpoint != "none") + (job.stages_per_rank > 1)


def preference(found: Estimate) -> tuple[int, int, float]:
    """Of plans of one layout: quickest, of those within a hundredth the one of fewest parts, then the lightest."""
    return round(log(found.seconds) / TIE_TOLERANCE), complexity(found), found.peak_memory.total


def rank_estimates(found: Iterable[Estimate]) -> list[Estimate]:
    """Quickest first; but the plan is the one with the fewest parts of those within a hundredth of the quickest."""
    ranked = sorted(found, key=lambda one: (one.seconds, complexity(one), one.peak_memory.total))
    alike = [one for one in ranked if one.seconds <= (1 + TIE_TOLERANCE) * ranked[0].seconds]
    plan = min(alike, key=lambda one: (complexity(one), one.seconds), default=None)
    return [plan, *(one for one in ranked if one is not plan)] if plan else []


def pareto_front(found: list[Estimate]) -> list[Estimate]:
    front: list[Estimate] = []
    for one in sorted(found, key=lambda each: (each.seconds, each.peak_memory.total)):
        if not front or one.peak_memory.total < front[-1].peak_memory.total:
            front.append(one)
    return front


def reestimate_exactly(desk: CostCache, ranked: list[Estimate]) -> list[Estimate]:
    """The first of a list by the exact formulas of their runs, those that fit by these, too."""
    if desk.work.base_config is None:
        return ranked
    jobs = [exact_job(desk.work, desk.cluster, Candidate.of(each.job)) for each in ranked]
    return [each for each in (estimate(job, exact=True, lessons=desk.lessons) for job in jobs) if each.fits]


def optimistic_seconds(desk: CostCache, frame: ModelParallelDegrees, space: SearchSpace) -> float:
    """Seconds of the best of a few plans of a frame, were there room for them: little and much divided, in the smallest
    and the largest passes, by the schedules that wait least.
    """
    sizes = [micro for micro in micro_batch_sizes(desk.work, frame) if filled_schedules(desk, frame, micro)]
    kinds = list(sharded_layouts(desk.work, frame, space))
    if not sizes or not kinds:
        return float("inf")
    least = checkpoint_modes(desk.work, space)[0]
    found = []
    for micro in {sizes[0], sizes[-1]} if frame.pipeline > 1 else sizes[-1:]:
        rows = filled_schedules(desk, frame, micro)
        split = [row for row in rows if SCHEDULES[row[0]].splits_backward]
        usual = [row for row in rows if not SCHEDULES[row[0]].splits_backward] or split
        for kind, each in {max(usual, key=lambda row: row[1]), (split or usual)[-1]}:
            for sharding, options in {kinds[0][0]: kinds[0], kinds[-1][0]: kinds[-1]}.values():
                choice = Candidate(options[-1], micro, sharding, least, kind, each, frame.method)
                if not desk.refused(choice):
                    found.append(desk.unweighed(choice).seconds)
    return min(found, default=0.0)


def filled_schedules(desk: CostCache, frame: ModelParallelDegrees, micro: int) -> list[tuple[str, int]]:
    """The schedules that a step of such passes fills."""
    micros_ = desk.work.global_batch // frame.data // micro
    found = [row for row in pipeline_schedules(desk.work, frame) if fills_schedule(row[0], frame.pipeline, micros_)]
    return [row for row in found if not SCHEDULES[row[0]].all_forward_first] if ("1f1b", 1) in found else found


def feasible_candidates(
    desk: CostCache, frame: ModelParallelDegrees, space: SearchSpace, best: BestByLayout
) -> Iterator[Candidate]:
    """Those of a frame that fit and are allowed, less what cannot be better than others of them. What is divided most
    comes first: passes that do not fit then fit nowhere.
    """
    order = checkpoint_modes(desk.work, space)
    hopeless: set[tuple[str, int, int, str]] = set()
    for sharding, options in reversed(list(sharded_layouts(desk.work, frame, space))):
        for layout in reversed(shard_group_layouts(desk, frame, space, sharding, options)):
            for kind, each in pipeline_schedules(desk.work, frame):
                found, level = [], 0
                for micro in micro_batch_sizes(desk.work, frame):
                    if (kind, each) not in filled_schedules(desk, frame, micro):
                        continue
                    choice = Candidate(layout, micro, sharding, order[level], kind, each, frame.method)
                    if desk.unweighed(choice).seconds > best.to_beat(choice):
                        continue
                    fitting = with_least_recomputation(desk, choice, order[level:], hopeless)
                    if fitting is None:
                        break
                    level = order.index(fitting.recompute)
                    found.append(fitting)
                yield from found if frame.pipeline > 1 else smallest_and_largest(found)


def checkpoint_modes(work: Workload, space: SearchSpace) -> tuple[str, ...]:
    pin = work.pinned.get("activation_checkpoint.mode")
    return space.recompute if pin is None else (str(pin),)


def with_least_recomputation(
    desk: CostCache, choice: Candidate, order: tuple[str, ...], hopeless: set[tuple[str, int, int, str]]
) -> Candidate | None:
    """With as little recomputed as fits."""
    for recompute in order:
        tried, passes = replace(choice, recompute=recompute), (choice.schedule, choice.stages, choice.micro, recompute)
        if passes in hopeless or desk.refused(tried):
            continue
        if desk.fits(tried):
            return tried
        hopeless.add(passes)
    return None


def smallest_and_largest(found: list[Candidate]) -> list[Candidate]:
    """Without a pipeline the largest passes are the quickest; the smallest may be as quick, and hold less."""
    kept: dict[tuple[str, str], Candidate] = {}
    for choice in found:
        kept.setdefault((choice.recompute, "smallest"), choice)
        kept[choice.recompute, "largest"] = choice
    return list(dict.fromkeys(kept.values()))


def shard_group_layouts(
    desk: CostCache, frame: ModelParallelDegrees, space: SearchSpace, sharding: str, options: list[Layout]
) -> list[Layout]:
    """Groups of shards: all ranks, a node, and the smallest that fit with the most and with the least recomputed."""
    if len(options) < 3:
        return options
    smallest = next(
        (size for size in micro_batch_sizes(desk.work, frame) if any(filled_schedules(desk, frame, size))), 1
    )
    kind, each = (filled_schedules(desk, frame, smallest) or pipeline_schedules(desk.work, frame))[0]
    node = [
        option for option in options if option.shard * option.context * option.tensor <= desk.cluster.devices_per_node
    ]
    kept = {options[-1]: True, **({node[-1]: True} if node else {})}
    for recompute in {checkpoint_modes(desk.work, space)[0], checkpoint_modes(desk.work, space)[-1]}:
        place = bisect_left(
            options,
            True,
            key=lambda option: desk.fits(Candidate(option, smallest, sharding, recompute, kind, each, frame.method)),
        )
        if place < len(options):
            kept[options[place]] = True
    return [option for option in options if option in kept]


def memory_saving_variants(desk: CostCache, space: SearchSpace, first: list[Candidate]) -> Iterator[Candidate]:
    """The first plans with more recomputed and in the smallest passes: slower, lighter."""
    for choice in first:
        for recompute in checkpoint_modes(desk.work, space):
            for micro in {choice.micro, 1} if "batch.micro" not in desk.work.pinned else {choice.micro}:
                tried = replace(choice, micro=micro, recompute=recompute)
                if not desk.refused(tried) and desk.fits(tried):
                    yield tried


def min_memory_candidate(desk: CostCache, space: SearchSpace | None = None) -> Candidate | None:
    """What holds least of all that is allowed, whether it fits or not; none where nothing divides."""
    space = space or SearchSpace(tensor=desk.cluster.device_count)
    found: list[Candidate] = []
    for frame in all_degrees(desk, space):
        sizes = [micro for micro in micro_batch_sizes(desk.work, frame) if filled_schedules(desk, frame, micro)]
        kinds = list(sharded_layouts(desk.work, frame, space))
        if not sizes or not kinds:
            continue
        sharding, options = kinds[-1]
        kind, each = filled_schedules(desk, frame, sizes[0])[0]
        start = Candidate(options[-1], sizes[0], sharding, "none", kind, each, frame.method)
        tried = [replace(start, recompute=recompute) for recompute in reversed(checkpoint_modes(desk.work, space))]
        found += [choice for choice in tried if not desk.refused(choice)][:1]
    return min(found, key=lambda choice: desk.peak_memory(choice).total, default=None)
