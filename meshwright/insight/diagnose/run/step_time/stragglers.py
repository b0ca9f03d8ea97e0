"""Stragglers: a rank that is slower than those with the same work, always, at a period, or now and then. Torch-free.

Ranks are compared by their local seconds: the time in a phase without the waits for other ranks. The comparison is
paired, step by step, so that a machine that is slow as a whole accuses nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.base.history.run_history import RunHistory
from meshwright.base.models.registry import block_costs
from meshwright.base.topology.parameter_shards import pipeline_placement
from meshwright.insight.diagnose.finding import Change, Confidence, Finding, MeasuredFigure
from meshwright.insight.diagnose.run.timed_steps import LIMITING_SHARE, Seconds, TimedSteps, timed_steps

STEADY_STEPS = 0.8
"""Share of the steps in which a steady straggler is behind its peers."""
STEADY_SHARE = 0.1
"""Share of the step time by which it is behind: ranks of a shared machine differ by less."""
PHASE_SHARE = 0.2
"""Share of the step time by which it is behind in one phase, if it is not behind in total."""
NOISE = 3.0
"""A typical difference must be this many times its standard error."""
OUTLIER_SHARE = 0.5
"""A stall is a step in which a rank is behind its peers by this share of the typical step time."""
MAX_OUTLIERS = 0.4
"""Share of the steps that may be outliers."""
MIN_STALLS = 3
"""Stalls that a period is read from."""
MAX_NAMED = 8
"""Ranks that a sentence lists."""
STAGE_RATIO = 1.6
"""A pipeline stage is slow if it takes this many times what its blocks explain."""

ACTIONS = {
    "fetch": "look at the storage and the loader of that rank's host, and raise data.workers",
    "copy": "look at the link between host and device of that rank",
    "forward": "look at that rank's device and host: clock rates, temperature, other processes on its cores",
    "backward": "look at that rank's device and host: clock rates, temperature, other processes on its cores",
    "update": "look at that rank's device and host: memory bandwidth, swapping, other processes",
}


def find(history: RunHistory) -> Iterator[Finding]:
    steps = timed_steps(history)
    if steps is None:
        return
    slow_stage = find_slow_stage(steps)
    if slow_stage is not None:
        yield slow_stage
        return
    behind = steps.above_peers(steps.local_seconds())
    by_phase = {
        phase: steps.above_peers(seconds, across_stages=phase == "fetch")  # every stage reads the samples
        for phase, seconds in steps.local.items()
    }
    slow_ranks = []
    for index in range(len(steps.ranks)):
        kinds = (steady(steps, index, behind[index], by_phase), stalls(steps, index, behind, by_phase))
        if found_kinds := [found for found in kinds if found is not None]:
            slow_ranks.append(max(found_kinds, key=lambda found: found.share))
    yield from join_ranks(slow_ranks, len(steps.ranks))
    if not slow_ranks and (found := common_stalls(steps)) is not None:
        yield found


def join_ranks(slow_ranks: list[Finding], ranks: int) -> Iterator[Finding]:
    """One finding per kind and phase: steps get faster only when all ranks that are slow in the same way do."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for found in slow_ranks:
        groups.setdefault((found.variant, found.phase), []).append(found)
    for (_, phase), group in groups.items():
        if phase == "fetch" and len(group) == ranks:
            continue  # samples that take long come to every rank: see `data_wait`
        slowest = max(group, key=lambda found: found.share)
        others = [str(found.rank) for found in group if found is not slowest]
        if others:
            names = ", ".join(others[:MAX_NAMED]) + (" and others" if len(others) > MAX_NAMED else "")
            also = f"rank {names} is" if len(others) == 1 else f"ranks {names} are"
            slowest = replace(slowest, sentence=f"{slowest.sentence}; {also} slow in the same way")
        yield slowest


def slowest_phase(
    steps: TimedSteps, index: int, by_phase: dict[str, Seconds], at: NDArray[np.bool_]
) -> tuple[str, float, float]:
    """The phase with the largest excess over the peers in some steps: (phase, seconds of the rank, of its peers)."""
    phase = max(by_phase, key=lambda name: float(by_phase[name][index][at].mean()))
    own, above = float(steps.local[phase][index][at].mean()), float(by_phase[phase][index][at].mean())
    return phase, own, own - above


def is_steady(behind: NDArray[np.float64], threshold: float) -> bool:
    """Whether a rank is behind in nearly every step, by at least `threshold` seconds."""
    typical = float(np.median(behind))
    error = 1.4826 * float(np.median(np.abs(behind - typical))) / len(behind) ** 0.5
    return typical >= max(threshold, NOISE * error) and float((behind > 0).mean()) >= STEADY_STEPS


def steady(steps: TimedSteps, index: int, behind: NDArray[np.float64], by_phase: dict[str, Seconds]) -> Finding | None:
    """A rank that is behind in nearly every step: in total, or by more in one phase, after which the others wait."""
    everywhere = np.ones(len(behind), dtype=bool)
    phase, own, others = slowest_phase(steps, index, by_phase, everywhere)
    if not is_steady(behind, STEADY_SHARE * steps.duration):
        behind = by_phase[phase][index]
        if not is_steady(behind, PHASE_SHARE * steps.duration) or own < 1.5 * others:
            return None
    typical = float(np.median(behind))
    share = typical / steps.duration
    rank = steps.ranks[index]
    return Finding(
        "straggler",
        "steady",
        f"rank {rank} is slower than the other ranks in every step, by {typical * 1e3:.0f} ms in {phase}: "
        f"the others wait for it",
        share,
        "high" if (behind > 0).mean() > 0.9 else "medium",
        rank=rank,
        phase=phase,
        evidence=(
            MeasuredFigure(f"local seconds in {phase}, rank {rank}", own, "s", others, "the median of the other ranks"),
            MeasuredFigure("steps in which it is behind", float((behind > 0).mean()), "share"),
        ),
        change=Change(action=f"{ACTIONS[phase]}; or continue without its host"),
        check="meshwright watch RUN",
    )


@dataclass(frozen=True)
class Stalls:
    """The steps in which one rank, or all, are far behind."""

    rows: NDArray[np.int64]
    """the columns of the steps"""
    period: int
    """steps from one to the next; 0 if they do not repeat"""


def find_stalls(steps: TimedSteps, behind: NDArray[np.float64]) -> Stalls | None:
    """The steps with an outlier in `behind`, if there are some but not many. The largest ones alone may have a period
    that smaller ones, of a busy machine, hide.
    """
    above = behind - max(0.0, float(np.median(behind)))
    smallest = OUTLIER_SHARE * steps.duration
    candidates = []
    for threshold in (max(smallest, float(above.max()) / 2), smallest):
        outliers = np.flatnonzero(above > threshold)
        if MIN_STALLS <= len(outliers) <= MAX_OUTLIERS * len(behind):
            candidates.append(Stalls(outliers, find_period(steps.steps[outliers])))
    return next((found for found in candidates if found.period), candidates[-1] if candidates else None)


def find_period(numbers: NDArray[np.int64]) -> int:
    """The period of step numbers: most gaps are equal to it or to a multiple, since steps may be missing. 0 if none."""
    gaps = np.diff(numbers)
    if len(gaps) < MIN_STALLS - 1:
        return 0
    period = int(np.median(gaps))
    regular = (gaps % period == 0) & (gaps <= 3 * period) if period > 1 else np.zeros(len(gaps), dtype=bool)
    return period if regular.mean() >= 0.75 and (gaps == period).mean() >= 0.6 else 0


def stalls(steps: TimedSteps, index: int, behind: Seconds, by_phase: dict[str, Seconds]) -> Finding | None:
    """A rank that stalls in some steps, at a period or now and then."""
    found = find_stalls(steps, behind[index])
    if found is None:
        return None
    lost = float(behind[index][found.rows].sum())
    share = lost / float(steps.seconds.mean(axis=0).sum())
    others = max((float(np.maximum(0.0, row).sum()) for i, row in enumerate(behind) if i != index), default=0.0)
    is_noise = lost < 2 * others or share < STEADY_SHARE
    if share < LIMITING_SHARE or (not found.period and is_noise):
        return None
    at = np.zeros(len(behind[index]), dtype=bool)
    at[found.rows] = True
    phase, own, peers = slowest_phase(steps, index, by_phase, at)
    rank, first = steps.ranks[index], int(steps.steps[found.rows[0]])
    when = f"every {found.period} steps" if found.period else f"in {len(found.rows)} of {len(at)} steps"
    confidence: Confidence = "high" if found.period else "medium"
    return Finding(
        "straggler",
        "periodic" if found.period else "now and then",
        f"rank {rank} stalls {when}, for {lost / len(found.rows) * 1e3:.0f} ms in {phase}: the others wait for it",
        share,
        confidence,
        rank=rank,
        step=first,
        phase=phase,
        evidence=(
            MeasuredFigure(f"local seconds in {phase} of those steps, rank {rank}", own, "s", peers, "the other ranks"),
            MeasuredFigure("steps with a stall", float(len(found.rows)), "count", float(len(at)), "all steps"),
            *([MeasuredFigure("steps from stall to stall", float(found.period), "count")] if found.period else ()),
        ),
        change=Change(
            action="look for what runs on that rank's host at this period: a cron job, a garbage collection, "
            "a callback, a log or metrics exporter"
            if found.period
            else f"{ACTIONS[phase]}; other processes on its host come and go"
        ),
        check="meshwright watch RUN",
    )


def common_stalls(steps: TimedSteps) -> Finding | None:
    """A stall of all ranks at a period. One without a period is a busy machine, and one in fetch is data-bound."""
    common = {phase: seconds.min(axis=0) for phase, seconds in steps.local.items() if phase != "fetch"}
    phase = max(common, key=lambda name: float(common[name].max()))
    found = find_stalls(steps, common[phase])
    if found is None or not found.period:
        return None
    typical = float(np.median(common[phase]))
    lost = float((common[phase][found.rows] - typical).sum())
    share = lost / float(steps.seconds.mean(axis=0).sum())
    if share < LIMITING_SHARE:
        return None
    length = lost / len(found.rows)
    return Finding(
        "straggler",
        "periodic",
        f"all ranks stall every {found.period} steps, for {length * 1e3:.0f} ms in {phase}",
        share,
        "high",
        step=int(steps.steps[found.rows[0]]),
        phase=phase,
        evidence=(
            MeasuredFigure(f"seconds in {phase} of those steps", typical + length, "s", typical, "the other steps"),
            MeasuredFigure("steps from stall to stall", float(found.period), "count"),
        ),
        change=Change(action=f"look for what runs at this period in {phase}: a callback, a hook, a garbage collection"),
        check="meshwright watch RUN",
    )


def stage_costs(steps: TimedSteps) -> NDArray[np.float64]:
    """The share of the model's FLOPs of every pipeline position; equal shares for a custom model."""
    positions = steps.layout.pipeline
    if steps.config.custom_model.class_:
        return np.full(positions, 1 / positions)
    costs, stride = block_costs(steps.config), steps.layout.stride("pipeline")
    shares = []
    for position in range(positions):
        placement = pipeline_placement(steps.config, steps.layout, position * stride, costs)
        shares.append(sum(costs[block] for blocks in placement.stages.values() for block in blocks))
    return np.array(shares) / sum(shares)


def stage_seconds(steps: TimedSteps, *phases: str) -> NDArray[np.float64]:
    """Typical local seconds of the passes of every pipeline position, over the ranks that have it."""
    seconds = np.median(steps.local_seconds(*phases), axis=1)
    return np.array([seconds[steps.stages == stage].mean() for stage in range(steps.layout.pipeline)])


def find_slow_stage(steps: TimedSteps) -> Finding | None:
    """A pipeline stage that takes longer than its share of the model explains."""
    if steps.layout.pipeline == 1 or len(set(steps.stages)) < steps.layout.pipeline:
        return None
    costs = stage_costs(steps)
    seconds = {phase: stage_seconds(steps, phase) for phase in ("forward", "backward")}
    total = seconds["forward"] + seconds["backward"]
    rates = total / costs
    stage = int(np.argmax(total))
    expected = float(np.median(np.delete(rates, stage)) * costs[stage])
    share = (float(total[stage]) - expected) / steps.duration
    if total[stage] < STAGE_RATIO * expected or share < STEADY_SHARE:
        return None
    index = max(
        np.flatnonzero(steps.stages == stage),
        key=lambda row: float(np.median(steps.local_seconds("forward", "backward")[row])),
    )
    excesses = {
        phase: one[stage] - np.median(np.delete(one / costs, stage)) * costs[stage] for phase, one in seconds.items()
    }
    phase = max(excesses, key=lambda name: excesses[name])
    rank = steps.ranks[index]
    return Finding(
        "straggler",
        "slow stage",
        f"pipeline stage {stage} (rank {rank}) takes {total[stage] / expected:.1f} times what its share of the model "
        f"explains, most of it in {phase}: the other stages wait for it",
        min(share, 1.0),
        "high" if total[stage] > 2 * expected else "medium",
        rank=rank,
        phase=phase,
        axis="pipeline",
        evidence=(
            MeasuredFigure(f"seconds of the passes, stage {stage}", float(total[stage]), "s", expected, "its share"),
            MeasuredFigure(f"share of the FLOPs, stage {stage}", float(costs[stage]), "share"),
        ),
        change=Change(action=ACTIONS[phase]),
        check="meshwright watch RUN",
    )
