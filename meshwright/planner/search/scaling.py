"""The scaling of a plan to more devices: strong and weak scaling, Amdahl's serial time, the next exposed collective.

A collective is hidden as long as the computation beside it takes longer. With the same batch on more devices that
computation gets shorter, and the collective does not, so that at some number of devices it becomes exposed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.base.hardware.cluster import Cluster
from meshwright.base.io import format_count, format_percent, format_seconds
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.traced_model import TracedModel
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import exposed_seconds, merged_calls
from meshwright.planner.search.candidate import Candidate, exact_job
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.search import search
from meshwright.planner.search.search_space import divisors, fills_schedule
from meshwright.planner.workload.workload import Workload

FACTORS = (1, 2, 4, 8, 16, 32, 64)
MIN_EFFICIENCY = 0.9
"""A plan that keeps less of its tokens per second per device is compared with a new plan."""
EXPOSED_SHARE = 0.01
"""The share of a step from which on a collective counts as exposed."""
MEMORY_ESTIMATES = 20
"""The memory estimates of the search for a new plan, in addition to the first ones of each combination of degrees."""


@dataclass(frozen=True)
class ScalingRow:
    factor: int
    devices: int
    batch: int
    """The samples per step, over all ranks."""
    estimate: Estimate | None
    """None if no layout on so many devices divides the batch and fits."""
    same_layout: bool
    """Whether the plan is the original one with more data-parallel ranks; otherwise it is a new one."""
    efficiency: float
    """Tokens per second per device, relative to the first row."""
    useful_tokens_per_second: float
    """Tokens per second, each discounted by 1 / (1 + batch / critical batch)."""

    @property
    def exposed_share(self) -> float:
        """The share of the step that is exposed communication."""
        return exposed_seconds(self.estimate) / self.estimate.seconds if self.estimate else 0.0


@dataclass(frozen=True)
class ExposedCollective:
    """Where a collective becomes exposed that the plan hides."""

    devices: int
    axis: str
    collective: str
    seconds: float
    """exposed seconds per step on so many devices"""
    share: float
    """their share of the step"""

    @property
    def message(self) -> str:
        return (
            f"{self.axis} {self.collective} becomes exposed at {self.devices:,} devices: "
            f"{format_seconds(self.seconds)}, {format_percent(self.share)} of the step"
        )


@dataclass(frozen=True)
class ScalingTable:
    strong: list[ScalingRow]
    """Strong scaling: the same global batch on more devices."""
    weak: list[ScalingRow]
    """Weak scaling: the global batch grows with the devices."""
    serial_fraction: float
    """Amdahl's law: the share of the first row's step that more devices do not shorten, fitted to the rows of `strong`
    that have the plan's layout."""
    serial_seconds: float
    """The same in seconds: exposed communication, update and host time that every step has."""
    strong_exposure: ExposedCollective | None
    weak_exposure: ExposedCollective | None
    """The next collective that becomes exposed with the plan's layout; None up to the largest row that divides."""
    largest: Estimate
    """The plan's layout on the most devices of `strong` over which the batch divides, and which fit."""
    critical_batch: float
    """The critical batch in tokens."""
    assumption: str
    """Where the critical batch comes from."""


def scale_candidate(
    work: Workload, cluster: Cluster, candidate: Candidate, factor: int, axis: str
) -> tuple[Candidate, Cluster] | None:
    """Multiplies the data-parallel ranks of an axis; None if the batch does not divide over them."""
    layout = candidate.layout
    data = layout.data_degree * factor
    if work.global_batch % data:
        return None
    scaled_layout = replace(layout, **{axis: getattr(layout, axis) * factor})
    local_batch = work.global_batch // data
    sizes = [micro for micro in divisors(local_batch) if micro <= candidate.micro]
    filling = [micro for micro in sizes if fills_schedule(candidate.schedule, layout.pipeline, local_batch // micro)]
    if not filling:
        return None
    scaled = candidate._replace(layout=scaled_layout, micro=filling[-1])
    return scaled, cluster.with_devices(cluster.device_count * factor)


def same_layout_estimate(cache: CostCache, chosen: Estimate, factor: int, weak: bool) -> Estimate | None:
    """Estimates the same plan on `factor` times the devices; None if it does not divide or fit.

    Replicas are multiplied if there are any, otherwise shards. Shards of a number of ranks that does not divide the
    parameters are padded; where they then do not fit, the shard groups of the plan are replicated.
    """
    work = cache.work.with_size(cache.work.global_batch * (factor if weak else 1))
    candidate = Candidate.from_job(chosen.job)
    has_replicas = candidate.sharding == "none" or candidate.layout.replicate > 1
    for axis in ("replicate",) if has_replicas else ("shard", "replicate"):
        scaled = scale_candidate(work, cache.cluster, candidate, factor, axis)
        if scaled is None:
            return None
        job = exact_job(work, scaled[1], scaled[0])  # as the plan was estimated
        plan = estimate(job, simulate_pipeline=True, corrections=cache.corrections, quick=True)
        if plan.peak_memory.total <= cache.memory_limit:
            return plan
    return None


def new_layout_estimate(cache: CostCache, factor: int, weak: bool) -> Estimate | None:
    """Searches the best plan on `factor` times the devices."""
    work = cache.work.with_size(cache.work.global_batch * (factor if weak else 1))
    scaled_keys = ("layout.replicate", "layout.shard_degree", "batch.micro")
    work = replace(work, pinned={key: value for key, value in work.pinned.items() if key not in scaled_keys})
    cluster = cache.cluster.with_devices(cache.cluster.device_count * factor)
    ranked = search(CostCache(work, cluster), top=1, max_memory_estimates=MEMORY_ESTIMATES).ranked
    return ranked[0] if ranked else None


def scaled_estimate(
    cache: CostCache, chosen: Estimate, factor: int, weak: bool, min_efficiency: float = 0.0
) -> tuple[Estimate | None, bool]:
    """Returns the estimate on `factor` times the devices, and whether the plan kept its layout.

    A new plan is searched if the same plan does not fit there, or keeps less than `min_efficiency` of its tokens per
    second per device.
    """
    same = same_layout_estimate(cache, chosen, factor, weak)
    if same is not None and same.tokens_per_second >= min_efficiency * factor * chosen.tokens_per_second:
        return same, True
    new = new_layout_estimate(cache, factor, weak)
    return (new, False) if new is not None and (same is None or new.seconds < same.seconds) else (same, True)


def scaling_table(cache: CostCache, chosen: Estimate, given_critical_batch: float | None = None) -> ScalingTable:
    critical, assumption = critical_batch(cache.work.model, given_critical_batch)

    def row(factor: int, weak: bool) -> ScalingRow:
        scaled, same_layout = (
            (chosen, True) if factor == 1 else scaled_estimate(cache, chosen, factor, weak, MIN_EFFICIENCY)
        )
        batch = cache.work.global_batch * (factor if weak else 1)
        rate = scaled.tokens_per_second if scaled else 0.0
        return ScalingRow(
            factor,
            cache.cluster.device_count * factor,
            batch,
            scaled,
            same_layout,
            rate / factor / chosen.tokens_per_second,
            rate / (1 + batch * cache.work.sequence / critical),
        )

    strong, weak_rows = ([row(factor, weak) for factor in FACTORS] for weak in (False, True))
    scaled = {weak: same_layout_estimates(cache, chosen, weak) for weak in (False, True)}
    points = [(plan.job.layout.ranks / cache.cluster.device_count, plan.seconds) for plan in scaled[False]]
    serial = serial_fraction(points)
    return ScalingTable(
        strong,
        weak_rows,
        serial,
        serial * chosen.seconds,
        next_exposure(scaled[False]),
        next_exposure(scaled[True]),
        scaled[False][-1],
        critical,
        assumption,
    )


def same_layout_estimates(cache: CostCache, chosen: Estimate, weak: bool) -> list[Estimate]:
    """Returns the plan, and the same layout on more devices as far as it divides the batch and fits."""
    estimates = [chosen]
    for factor in FACTORS[1:]:
        plan = same_layout_estimate(cache, chosen, factor, weak)
        if plan is not None:
            estimates.append(plan)
    return estimates


def next_exposure(plans: list[Estimate]) -> ExposedCollective | None:
    """Returns the first collective whose exposed share of the step grows past the threshold."""
    first = exposed_shares(plans[0])
    for plan in plans[1:]:
        newly = {
            key: share
            for key, share in exposed_shares(plan).items()
            if share >= EXPOSED_SHARE and first.get(key, 0.0) < EXPOSED_SHARE
        }
        if newly:
            axis, collective = max(newly, key=lambda key: newly[key])
            share = newly[axis, collective]
            return ExposedCollective(plan.job.layout.ranks, axis, collective, share * plan.seconds, share)
    return None


def nearest_exposure(plan: Estimate) -> str:
    """Names the hidden collective that takes the longest beside the computation that hides it."""
    hidden = [call for call in merged_calls(plan) if call.seconds > call.exposed_seconds]
    if not hidden:
        return "nothing is hidden"
    call = max(hidden, key=lambda each: each.seconds)
    compute = sum(plan.phases.get(phase, 0.0) for phase in ("forward", "backward", "recompute"))
    return (
        f"{call.axis} {call.collective} comes closest, {format_seconds(call.seconds)} beside "
        f"{format_seconds(compute)} of computation"
    )


def exposed_shares(plan: Estimate) -> dict[tuple[str, str], float]:
    """Returns the exposed share of the step by axis and collective."""
    shares: dict[tuple[str, str], float] = {}
    for call in merged_calls(plan):
        key = call.axis, call.collective
        shares[key] = shares.get(key, 0.0) + call.exposed_seconds / plan.seconds
    return shares


def serial_fraction(points: list[tuple[float, float]]) -> float:
    """Fits Amdahl's law T(n) = T(1) (s + (1 - s) / n) to (n, T) and returns s; n = 1 is the first point.

    The squares of relative errors are minimized: those of seconds would ignore the rows with many devices, whose steps
    are short, and s is a large part of those alone.
    """
    first = points[0][1]
    rows = [(1 / n, seconds / first) for n, seconds in points[1:]]
    numerator = sum((1 - ideal) * (measured - ideal) / measured**2 for ideal, measured in rows)
    denominator = sum((1 - ideal) ** 2 / measured**2 for ideal, measured in rows)
    return min(1.0, max(0.0, numerator / denominator)) if denominator else 0.0


def critical_batch(model: Architecture | TracedModel, given: float | None = None) -> tuple[float, str]:
    """Returns the critical batch in tokens, at which doubling the batch saves only a quarter of the steps, and where
    the figure comes from.

    A loss L has a critical batch of 2.1e8 L^-4.8 tokens (Kaplan 2020, arXiv:2001.08361, figure 10). The loss after 20
    tokens per parameter is 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28 (Hoffmann 2022, arXiv:2203.15556).
    """
    if given is not None:
        return given, f"critical batch: {format_count(given)} tokens, as given"
    parameters = model.active_parameters
    loss = 1.69 + 406.4 / parameters**0.34 + 410.7 / (20 * parameters) ** 0.28
    tokens = 2.1e8 * loss**-4.8
    return tokens, (
        f"critical batch (assumed): {format_count(tokens)} tokens, by 2.1e8 L^-4.8 (arXiv:2001.08361) at a loss of "
        f"{loss:.2f} after 20 tokens per parameter (arXiv:2203.15556); to use another value, give --critical-batch"
    )
