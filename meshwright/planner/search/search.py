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
from meshwright.planner.search.candidates import ModelParallelDegrees, Space, fills, frames, layouts, micros, schedules
from meshwright.planner.search.choice import Choice, exact, job_of, refusal
from meshwright.planner.workload.trainer_profiles import MESHWRIGHT
from meshwright.planner.workload.workload import Workload
from meshwright.topology.layout import Layout
from meshwright.topology.schedules import SPLIT

MOST_WEIGHED = 250
"""Plans of one search that are weighed after one of every frame, in the frames whose plan was quickest."""
MARGIN = 1.05
"""A frame is looked into where the best of its few sketches takes so many times the last of the list, or less."""
ALIKE = 0.01
"""Plans are as quick as each other within this."""
KEPT = 8
"""Plans in the list, at least."""


@dataclass(frozen=True)
class Found:
    ranked: list[Estimate]
    """of every layout that fits and was looked into its best; see in_order"""
    front: list[Estimate]
    """those of all that fit than which none is both quicker and lighter, quickest first"""
    estimates: int
    """steps that were timed"""
    weighed: int
    """jobs whose memory was asked for"""
    frames: int
    """ways to cut the model"""
    left_out: int
    """of these, not looked into: their arithmetic alone takes longer, nothing fits, or enough was weighed"""


class CostCache:
    """What was estimated of one workload on one cluster, each thing once."""

    def __init__(self, work: Workload, cluster: Cluster) -> None:
        self.work, self.cluster, self.lessons = work, cluster, corrections_for(cluster)
        self.weights: dict[Choice, list[MemoryEstimate]] = {}
        self.heavy: dict[Choice, MemoryEstimate] = {}
        self.bare: dict[Choice, Estimate] = {}
        self.timings: dict[Choice, Estimate] = {}
        self.refusals: dict[Choice, bool] = {}

    @property
    def counts(self) -> tuple[int, int]:
        """(plans timed, plans weighed)"""
        return len({*self.bare, *self.timings}), len(self.weights)

    def weigh(self, choice: Choice) -> list[MemoryEstimate]:
        if choice not in self.weights:
            job = job_of(self.work, self.cluster, choice)
            self.weights[choice] = self.lessons.correct_memory(job, estimate_memory(job, quick=True))
        return self.weights[choice]

    def peak_memory(self, choice: Choice) -> MemoryEstimate:
        if choice not in self.heavy:
            self.heavy[choice] = max(self.weigh(choice), key=lambda stage: stage.total)
        return self.heavy[choice]

    def fits(self, choice: Choice) -> bool:
        """Weighed only where what is held between steps would have room."""
        capacity = self.cluster.device.memory
        return least_held(self.work, choice) <= capacity and self.peak_memory(choice).total <= capacity

    def unweighed(self, choice: Choice) -> Estimate:
        """Its seconds, whether it fits or not."""
        if choice not in self.bare:
            self.bare[choice] = estimate_step(job_of(self.work, self.cluster, choice), [])
        return self.bare[choice]

    def time(self, choice: Choice) -> Estimate:
        if choice not in self.timings:
            found = estimate_step(job_of(self.work, self.cluster, choice), self.weigh(choice))
            self.timings[choice] = self.lessons.correct_estimate(found)
        return self.timings[choice]

    def refused(self, choice: Choice) -> bool:
        if choice not in self.refusals:
            self.refusals[choice] = refusal(self.work, choice) is not None
        return self.refusals[choice]


def least_held(work: Workload, choice: Choice) -> float:
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


class Best:
    """The best plan of every layout so far, and the seconds of the last that the list has room for."""

    def __init__(self, top: int) -> None:
        self.top, self.last = top, float("inf")
        self.plans: dict[tuple[Layout, str], Estimate] = {}

    def to_beat(self, choice: Choice) -> float:
        """Seconds beyond which a choice changes nothing: of its layout's best, and of the last of the list."""
        known = self.plans.get(choice.family)
        return min(self.last, known.seconds if known else self.last)

    def keep(self, found: Estimate) -> None:
        family = Choice.of(found.job).family
        if family in self.plans and merit(found) >= merit(self.plans[family]):
            return
        self.plans[family] = found
        if found.seconds < self.last and len(self.plans) >= self.top:
            self.last = sorted(each.seconds for each in self.plans.values())[self.top - 1]


def search(desk: CostCache, space: Space | None = None, top: int = KEPT, most: int = MOST_WEIGHED) -> Found:
    """Of a workload on all devices of a cluster. Frames are taken in the order of what they promise, whether it fits or
    not, and of each one plan is made at once; then those whose plan is quick are looked into first.
    """
    space = space or Space()
    before = desk.counts
    every = [(promise(desk, frame, space), frame) for frame in every_frame(desk, space)]
    best = Best(top)
    begun: list[tuple[Estimate, float, ModelParallelDegrees]] = []
    for promised, frame in sorted(every, key=lambda row: row[0]):
        if promised <= MARGIN * best.last and (choice := first_of(desk, frame, space)) is not None:
            begun.append((desk.time(choice), promised, frame))
            best.keep(begun[-1][0])
    if not begun and "tensor" in space.axes and space.tensor is None:
        return search(desk, replace(space, tensor=desk.cluster.device_count), top, most)  # beyond a node, then
    tried = {Choice.of(found.job) for found, *_ in begun}
    enough, left = len(desk.weights) + most, len(every) - len(begun)
    for _, promised, frame in sorted(begun, key=lambda row: row[0].seconds):
        if promised > MARGIN * best.last or len(desk.weights) > enough:
            left += 1
            continue
        for choice in choices(desk, frame, space, best):
            tried.add(choice)
            best.keep(desk.time(choice))
    ranked = in_order(best.plans.values())
    tried |= set(thrifty(desk, space, [Choice.of(found.job) for found in ranked[:3]]))
    first = first_exact(desk, ranked[:top])
    known = {Choice.of(found.job) for found in ranked[:top]}
    front = pareto([*first, *(desk.time(choice) for choice in tried - known)])
    return Found(
        in_order(first) + ranked[top:],
        front,
        desk.counts[0] - before[0],
        desk.counts[1] - before[1],
        len(every),
        left,
    )


def first_of(desk: CostCache, frame: ModelParallelDegrees, space: Space) -> Choice | None:
    """A plan of a frame that is likely to be among its best: the least that fits is recomputed, then divided."""
    sizes = [micro for micro in micros(desk.work, frame) if filled(desk, frame, micro)]
    kinds = list(layouts(desk.work, frame, space))
    for recompute in levels(desk.work, space) if sizes and kinds else ():
        rows = [row for row in filled(desk, frame, sizes[0]) if row[0] not in SPLIT] or filled(desk, frame, sizes[0])
        for kind, each in dict.fromkeys((max(rows, key=lambda row: row[1]), rows[0])):  # many stages hold more
            tried = [
                Choice(options[-1], sizes[0], sharding, recompute, kind, each, frame.method)
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


def every_frame(desk: CostCache, space: Space) -> Iterator[ModelParallelDegrees]:
    return frames(desk.work, desk.cluster.device_count, desk.cluster.devices_per_node, space)


def parts(found: Estimate) -> int:
    """How much there is to a plan."""
    job = found.job
    shards = (job.sharding != "none") + (job.sharding == "parameters") + (job.layout.replicate > 1 < job.layout.shard)
    return 2 * len(job.layout.axes) + shards + (job.activation_checkpoint != "none") + (job.stages_per_rank > 1)


def merit(found: Estimate) -> tuple[int, int, float]:
    """Of plans of one layout: quickest, of those within a hundredth the one of fewest parts, then the lightest."""
    return round(log(found.seconds) / ALIKE), parts(found), found.peak_memory.total


def in_order(found: Iterable[Estimate]) -> list[Estimate]:
    """Quickest first; but the plan is the one with the fewest parts of those within a hundredth of the quickest."""
    ranked = sorted(found, key=lambda one: (one.seconds, parts(one), one.peak_memory.total))
    alike = [one for one in ranked if one.seconds <= (1 + ALIKE) * ranked[0].seconds]
    plan = min(alike, key=lambda one: (parts(one), one.seconds), default=None)
    return [plan, *(one for one in ranked if one is not plan)] if plan else []


def pareto(found: list[Estimate]) -> list[Estimate]:
    front: list[Estimate] = []
    for one in sorted(found, key=lambda each: (each.seconds, each.peak_memory.total)):
        if not front or one.peak_memory.total < front[-1].peak_memory.total:
            front.append(one)
    return front


def first_exact(desk: CostCache, ranked: list[Estimate]) -> list[Estimate]:
    """The first of a list by the exact formulas of their runs, those that fit by these, too."""
    if desk.work.base_config is None:
        return ranked
    jobs = [exact(desk.work, desk.cluster, Choice.of(each.job)) for each in ranked]
    return [each for each in (estimate(job, exact=True, lessons=desk.lessons) for job in jobs) if each.fits]


def promise(desk: CostCache, frame: ModelParallelDegrees, space: Space) -> float:
    """Seconds of the best of a few plans of a frame, were there room for them: little and much divided, in the smallest
    and the largest passes, by the schedules that wait least.
    """
    sizes = [micro for micro in micros(desk.work, frame) if filled(desk, frame, micro)]
    kinds = list(layouts(desk.work, frame, space))
    if not sizes or not kinds:
        return float("inf")
    least = levels(desk.work, space)[0]
    found = []
    for micro in {sizes[0], sizes[-1]} if frame.pipeline > 1 else sizes[-1:]:
        rows = filled(desk, frame, micro)
        split = [row for row in rows if row[0] in SPLIT]
        usual = [row for row in rows if row[0] not in SPLIT] or split
        for kind, each in {max(usual, key=lambda row: row[1]), (split or usual)[-1]}:
            for sharding, options in {kinds[0][0]: kinds[0], kinds[-1][0]: kinds[-1]}.values():
                choice = Choice(options[-1], micro, sharding, least, kind, each, frame.method)
                if not desk.refused(choice):
                    found.append(desk.unweighed(choice).seconds)
    return min(found, default=0.0)


def filled(desk: CostCache, frame: ModelParallelDegrees, micro: int) -> list[tuple[str, int]]:
    """The schedules that a step of such passes fills."""
    micros_ = desk.work.global_batch // frame.data // micro
    found = [row for row in schedules(desk.work, frame) if fills(row[0], frame.pipeline, micros_)]
    return [row for row in found if row[0] != "gpipe"] if ("1f1b", 1) in found else found


def choices(desk: CostCache, frame: ModelParallelDegrees, space: Space, best: Best) -> Iterator[Choice]:
    """Those of a frame that fit and are allowed, less what cannot be better than others of them. What is divided most
    comes first: passes that do not fit then fit nowhere.
    """
    order = levels(desk.work, space)
    hopeless: set[tuple[str, int, int, str]] = set()
    for sharding, options in reversed(list(layouts(desk.work, frame, space))):
        for layout in reversed(degrees(desk, frame, space, sharding, options)):
            for kind, each in schedules(desk.work, frame):
                found, level = [], 0
                for micro in micros(desk.work, frame):
                    if (kind, each) not in filled(desk, frame, micro):
                        continue
                    choice = Choice(layout, micro, sharding, order[level], kind, each, frame.method)
                    if desk.unweighed(choice).seconds > best.to_beat(choice):
                        continue
                    fitting = lightest_change(desk, choice, order[level:], hopeless)
                    if fitting is None:
                        break
                    level = order.index(fitting.recompute)
                    found.append(fitting)
                yield from found if frame.pipeline > 1 else ends(found)


def levels(work: Workload, space: Space) -> tuple[str, ...]:
    pin = work.pinned.get("activation_checkpoint.mode")
    return space.recompute if pin is None else (str(pin),)


def lightest_change(
    desk: CostCache, choice: Choice, order: tuple[str, ...], hopeless: set[tuple[str, int, int, str]]
) -> Choice | None:
    """With as little recomputed as fits."""
    for recompute in order:
        tried, passes = replace(choice, recompute=recompute), (choice.schedule, choice.stages, choice.micro, recompute)
        if passes in hopeless or desk.refused(tried):
            continue
        if desk.fits(tried):
            return tried
        hopeless.add(passes)
    return None


def ends(found: list[Choice]) -> list[Choice]:
    """Without a pipeline the largest passes are the quickest; the smallest may be as quick, and hold less."""
    kept: dict[tuple[str, str], Choice] = {}
    for choice in found:
        kept.setdefault((choice.recompute, "smallest"), choice)
        kept[choice.recompute, "largest"] = choice
    return list(dict.fromkeys(kept.values()))


def degrees(
    desk: CostCache, frame: ModelParallelDegrees, space: Space, sharding: str, options: list[Layout]
) -> list[Layout]:
    """Groups of shards: all ranks, a node, and the smallest that fit with the most and with the least recomputed."""
    if len(options) < 3:
        return options
    smallest = next((size for size in micros(desk.work, frame) if any(filled(desk, frame, size))), 1)
    kind, each = (filled(desk, frame, smallest) or schedules(desk.work, frame))[0]
    node = [
        option for option in options if option.shard * option.context * option.tensor <= desk.cluster.devices_per_node
    ]
    kept = {options[-1]: True, **({node[-1]: True} if node else {})}
    for recompute in {levels(desk.work, space)[0], levels(desk.work, space)[-1]}:
        place = bisect_left(
            options,
            True,
            key=lambda option: desk.fits(Choice(option, smallest, sharding, recompute, kind, each, frame.method)),
        )
        if place < len(options):
            kept[options[place]] = True
    return [option for option in options if option in kept]


def thrifty(desk: CostCache, space: Space, first: list[Choice]) -> Iterator[Choice]:
    """The first plans with more recomputed and in the smallest passes: slower, lighter."""
    for choice in first:
        for recompute in levels(desk.work, space):
            for micro in {choice.micro, 1} if "batch.micro" not in desk.work.pinned else {choice.micro}:
                tried = replace(choice, micro=micro, recompute=recompute)
                if not desk.refused(tried) and desk.fits(tried):
                    yield tried


def lightest(desk: CostCache, space: Space | None = None) -> Choice | None:
    """What holds least of all that is allowed, whether it fits or not; none where nothing divides."""
    space = space or Space(tensor=desk.cluster.device_count)
    found: list[Choice] = []
    for frame in every_frame(desk, space):
        sizes = [micro for micro in micros(desk.work, frame) if filled(desk, frame, micro)]
        kinds = list(layouts(desk.work, frame, space))
        if not sizes or not kinds:
            continue
        sharding, options = kinds[-1]
        kind, each = filled(desk, frame, sizes[0])[0]
        start = Choice(options[-1], sizes[0], sharding, "none", kind, each, frame.method)
        tried = [replace(start, recompute=recompute) for recompute in reversed(levels(desk.work, space))]
        found += [choice for choice in tried if not desk.refused(choice)][:1]
    return min(found, key=lambda choice: desk.peak_memory(choice).total, default=None)
