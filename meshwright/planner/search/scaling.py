"""The scaling of a plan to more devices: strong and weak scaling, Amdahl's serial fraction, and the critical batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.io import format_count
from meshwright.models.architecture import Architecture
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import exposed_seconds
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.search.candidate import Candidate, candidate_job
from meshwright.planner.search.cost_cache import CostCache
from meshwright.planner.search.search import search
from meshwright.planner.search.search_space import divisors, fills_schedule
from meshwright.planner.workload.traced_model import TracedModel
from meshwright.planner.workload.workload import Workload

FACTORS = (1, 2, 4, 8, 16, 32, 64)
MIN_EFFICIENCY = 0.9
"""A plan that keeps less of its tokens per second per device is compared with a new plan."""
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
class ScalingTable:
    strong: list[ScalingRow]
    """Strong scaling: the same global batch on more devices."""
    weak: list[ScalingRow]
    """Weak scaling: the global batch grows with the devices."""
    serial_fraction: float
    """Amdahl's law: the share of the first row's step that more devices do not shorten, fitted to `strong`."""
    critical_batch: float
    """The critical batch in tokens."""
    assumption: str
    """Where the critical batch comes from."""


def scale_candidate(
    work: Workload, cluster: Cluster, candidate: Candidate, factor: int
) -> tuple[Candidate, Cluster] | None:
    """Multiplies the data-parallel ranks: the replicas if there are any, otherwise the shards."""
    layout = candidate.layout
    data = layout.data_degree * factor
    if work.global_batch % data:
        return None
    axis = "replicate" if candidate.sharding == "none" or layout.replicate > 1 else "shard"
    scaled_layout = replace(layout, **{axis: getattr(layout, axis) * factor})
    local_batch = work.global_batch // data
    sizes = [micro for micro in divisors(local_batch) if micro <= candidate.micro]
    filling = [micro for micro in sizes if fills_schedule(candidate.schedule, layout.pipeline, local_batch // micro)]
    if not filling:
        return None
    scaled = replace(candidate, layout=scaled_layout, micro=filling[-1])
    return scaled, cluster.with_devices(cluster.device_count * factor)


def same_layout_estimate(cache: CostCache, chosen: Estimate, factor: int, weak: bool) -> Estimate | None:
    """Estimates the same plan on `factor` times the devices; None if it does not divide or fit."""
    work = cache.work.with_size(cache.work.global_batch * (factor if weak else 1))
    scaled = scale_candidate(work, cache.cluster, Candidate.from_job(chosen.job), factor)
    if scaled is None:
        return None
    candidate, cluster = scaled
    plan = estimate(candidate_job(work, cluster, candidate), corrections=cache.corrections)
    return plan if plan.fits else None


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
    return ScalingTable(strong, weak_rows, serial_fraction(strong), critical, assumption)


def serial_fraction(rows: list[ScalingRow]) -> float:
    """Fits Amdahl's law T(n) / T(1) = s + (1 - s) / n by least squares and returns s."""
    points = [
        (1 / row.factor, row.estimate.seconds / rows[0].estimate.seconds)
        for row in rows[1:]
        if row.estimate and rows[0].estimate
    ]
    numerator = sum((1 - ideal) * (measured - ideal) for ideal, measured in points)
    denominator = sum((1 - ideal) ** 2 for ideal, _ in points)
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
