"""The same plan on more devices: what it gains, what eats the gain, where larger batches stop paying; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.io import format_count
from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.describe import exposed_seconds
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.search.candidate import Candidate, candidate_job
from meshwright.planner.search.search import CostCache, search
from meshwright.planner.search.search_space import divisors, fills_schedule
from meshwright.planner.workload.architecture import Architecture
from meshwright.planner.workload.workload import Workload

FACTORS = (1, 2, 4, 8, 16, 32, 64)
MIN_EFFICIENCY = 0.9
"""of its tokens a second and device: a plan that keeps less is held against a new one"""
MEMORY_ESTIMATES = 20
"""plans of a new search, after one of every frame"""


@dataclass(frozen=True)
class ScalingRow:
    factor: int
    devices: int
    batch: int
    estimate: Estimate | None
    """none: no layout of so many devices divides the batch and fits"""
    kept: bool
    """whether it is the plan with more data-parallel ranks; else a new one"""
    efficiency: float
    """tokens a second and device, against those of the first row"""
    useful_tokens_per_second: float
    """tokens a second that count as such below the critical batch: of a batch B they are 1 / (1 + B / critical)"""

    @property
    def exposed_share(self) -> float:
        """Share of the step in which messages are exposed."""
        return exposed_seconds(self.estimate) / self.estimate.seconds if self.estimate else 0.0


@dataclass(frozen=True)
class ScalingTable:
    strong: list[ScalingRow]
    """the same batch on more devices"""
    weak: list[ScalingRow]
    """a batch that grows with the devices"""
    serial_fraction: float
    """Amdahl's: the share of the first row's step that more devices do not shorten, fitted to `strong`"""
    critical: float
    """tokens a step"""
    assumption: str


def scale_candidate(
    work: Workload, cluster: Cluster, choice: Candidate, factor: int
) -> tuple[Candidate, Cluster] | None:
    """The plan with so many times the data-parallel ranks: copies where there are any, else shards."""
    layout = choice.layout
    data = layout.data_degree * factor
    if work.global_batch % data:
        return None
    axis = "replicate" if choice.sharding == "none" or layout.replicate > 1 else "shard"
    more = replace(layout, **{axis: getattr(layout, axis) * factor})
    local = work.global_batch // data
    sizes = [micro for micro in divisors(local) if micro <= choice.micro]
    full = [micro for micro in sizes if fills_schedule(choice.schedule, layout.pipeline, local // micro)]
    return (
        (replace(choice, layout=more, micro=full[-1]), cluster.with_devices(cluster.device_count * factor))
        if full
        else None
    )


def same_layout_estimate(desk: CostCache, chosen: Estimate, factor: int, growing: bool) -> Estimate | None:
    """The plan itself at so many times the devices; none where it does not divide or fit."""
    work = desk.work.with_size(desk.work.global_batch * (factor if growing else 1))
    more = scale_candidate(work, desk.cluster, Candidate.of(chosen.job), factor)
    found = estimate(candidate_job(work, more[1], more[0]), lessons=desk.lessons) if more is not None else None
    return found if found is not None and found.fits else None


def new_layout_estimate(desk: CostCache, factor: int, growing: bool) -> Estimate | None:
    """The best of a search at so many times the devices."""
    work = desk.work.with_size(desk.work.global_batch * (factor if growing else 1))
    counts = ("layout.replicate", "layout.shard_degree", "batch.micro")
    free = replace(work, pinned={key: value for key, value in work.pinned.items() if key not in counts})
    found = search(
        CostCache(free, desk.cluster.with_devices(desk.cluster.device_count * factor)), top=1, most=MEMORY_ESTIMATES
    ).ranked
    return found[0] if found else None


def scaled_estimate(
    desk: CostCache, chosen: Estimate, factor: int, growing: bool, enough: float = 0.0
) -> tuple[Estimate | None, bool]:
    """(the estimate at so many times the devices, whether the plan kept its shape). A new plan is sought where the old
    one does not go on, or has less than `enough` of its tokens a second and device.
    """
    kept = same_layout_estimate(desk, chosen, factor, growing)
    if kept is not None and kept.tokens_per_second >= enough * factor * chosen.tokens_per_second:
        return kept, True
    new = new_layout_estimate(desk, factor, growing)
    return (new, False) if new is not None and (kept is None or new.seconds < kept.seconds) else (kept, True)


def scaling_table(desk: CostCache, chosen: Estimate, critical: float | None = None) -> ScalingTable:
    tokens, told = critical_batch(desk.work.model, critical)
    sides: list[list[ScalingRow]] = []
    for growing in (False, True):
        rows: list[ScalingRow] = []
        for factor in FACTORS:
            found, kept = (
                (chosen, True) if factor == 1 else scaled_estimate(desk, chosen, factor, growing, MIN_EFFICIENCY)
            )
            batch = desk.work.global_batch * (factor if growing else 1)
            rate = found.tokens_per_second if found else 0.0
            rows.append(
                ScalingRow(
                    factor,
                    desk.cluster.device_count * factor,
                    batch,
                    found,
                    kept,
                    rate / factor / chosen.tokens_per_second,
                    rate / (1 + batch * desk.work.sequence / tokens),
                )
            )
        sides.append(rows)
    return ScalingTable(sides[0], sides[1], serial_share(sides[0]), tokens, told)


def serial_share(rows: list[ScalingRow]) -> float:
    """Amdahl: T(n) / T(1) = s + (1 - s) / n; s by least squares."""
    points = [
        (1 / row.factor, row.estimate.seconds / rows[0].estimate.seconds)
        for row in rows[1:]
        if row.estimate and rows[0].estimate
    ]
    above = sum((1 - ideal) * (took - ideal) for ideal, took in points)
    below = sum((1 - ideal) ** 2 for ideal, _ in points)
    return min(1.0, max(0.0, above / below)) if below else 0.0


def critical_batch(model: Architecture, given: float | None = None) -> tuple[float, str]:
    """(tokens a step where twice the samples save a quarter of the steps and no more, where the figure comes from).

    A loss L has a critical batch of 2.1e8 L^-4.8 tokens (Kaplan 2020, arXiv:2001.08361, figure 10). The loss at the end
    of 20 tokens a parameter is 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28 (Hoffmann 2022, arXiv:2203.15556).
    """
    if given is not None:
        return given, f"critical batch {format_count(given)} tokens, as given"
    numbers = model.active_parameters
    loss = 1.69 + 406.4 / numbers**0.34 + 410.7 / (20 * numbers) ** 0.28
    tokens = 2.1e8 * loss**-4.8
    return tokens, (
        f"critical batch assumed: {format_count(tokens)} tokens, by 2.1e8 L^-4.8 (arXiv:2001.08361) at a "
        f"loss of {loss:.2f} "
        f"after 20 tokens a parameter (arXiv:2203.15556); give --critical-batch, or measure noise_scale"
    )
