"""How wrong the planner is: every record of a file predicted, and held against what was measured.

| figure | of |
|---|---|
| seconds | median and 90th percentile of the absolute error, and its mean |
| alone | the same median with the constants of other software than the source's own |
| inside | share of runs that lie in their intervals of four in five |
| memory | median and 90th percentile, of the kind of memory that the source printed |
| oom, wrongly | runs that ran out of memory, and how many are said not to fit; runs that ran, and are said not to fit |
| tau, regret | where the same work ran on other layouts: Kendall's rank correlation, and what the predicted best cost |
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.published_runs import PublishedRun, read_published_runs
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.workload.trainer_profiles import unfitted_profile

SWEEP = 3
"""Runs of the same work that make a sweep."""


@dataclass(frozen=True)
class ReplayedRun:
    """A record, and what is predicted of it."""

    run: PublishedRun
    estimate: Estimate

    @property
    def error(self) -> float | None:
        """Of the step's seconds; 0.1 is ten percent too long."""
        return self.estimate.seconds / self.run.seconds - 1 if self.run.seconds else None

    @property
    def predicted_memory(self) -> float:
        heaviest = self.estimate.peak_memory
        return heaviest.total if self.run.memory_kind == "total" else heaviest.reserved

    @property
    def memory_error(self) -> float | None:
        return self.predicted_memory / self.run.memory - 1 if self.run.memory else None

    @property
    def inside_interval(self) -> bool:
        return (
            self.run.seconds is not None
            and self.estimate.interval_low <= self.run.seconds <= self.estimate.interval_high
        )


@dataclass(frozen=True)
class SourceScore:
    """Of the runs of one source."""

    source: str
    runs: int
    timed: int
    median: float | None
    ninth: float | None
    mean: float | None
    alone: float | None
    inside: float | None
    weighed: int
    memory_median: float | None
    memory_ninth: float | None
    oom: int
    oom_right: int
    wrongly: int
    """fully stated runs that ran, and are said not to fit"""
    sweeps: int
    tau: float | None
    regret: float | None
    """both in the mean over sweeps"""
    worst: float | None
    """the largest regret"""


def replay_run(record: PublishedRun) -> ReplayedRun:
    return ReplayedRun(record, estimate(record.job, unstated=bool(record.assumptions)))


def replay(path: Path) -> dict[str, Any]:
    """Every figure, by source and of all; and which records were left out, and why."""
    records, left = read_published_runs(path)
    flagged = [record.name for record in records if record.flagged]
    twins = []
    for record in records:
        try:
            twins += [] if record.flagged else [replay_run(record)]
        except (ArithmeticError, LookupError, ValueError) as error:
            left[record.name] = f"it cannot be: {error}"
    by_source: dict[str, list[ReplayedRun]] = defaultdict(list)
    for one in twins:
        by_source[family(one.run.source)].append(one)
    scores = [score(source, rows) for source, rows in sorted(by_source.items())]
    stated = [one for one in twins if one.run.fully_stated]
    scores.append(score("fully stated", stated))
    scores.append(score("all", twins))
    return {
        "file": str(path),
        "scores": [asdict(one) for one in scores],
        "left_out": left | dict.fromkeys(flagged, "its source or its collector doubts it"),
        "records": [told(one) for one in twins],
    }


def told(one: ReplayedRun) -> dict[str, Any]:
    record, found = one.run, one.estimate
    return {
        "id": record.name,
        "software": found.job.trainer.name,
        "assumed": list(record.assumptions),
        "seconds": {
            "predicted": found.seconds,
            "low": found.interval_low,
            "high": found.interval_high,
            "measured": record.seconds,
        },
        "memory": {"predicted": one.predicted_memory, "measured": record.memory, "counted": record.memory_kind},
        "fits": found.fits,
        "phases": found.phases,
    }


def family(source: str) -> str:
    """Who published it: what stands before the first file, table or row."""
    return re.split(r"[ ,(]", source.replace("repo train", "repo/train"), maxsplit=1)[0].split("/docs")[0]


def score(source: str, twins: list[ReplayedRun]) -> SourceScore:
    errors = [abs(one.error) for one in twins if one.error is not None]
    weighed = [abs(one.memory_error) for one in twins if one.memory_error is not None]
    oom = [one for one in twins if one.run.out_of_memory]
    ran = [one for one in twins if not one.run.out_of_memory and one.run.seconds and not one.run.assumptions]
    ranks = [rank_sweep(rows) for rows in sweeps(twins)]
    return SourceScore(
        source,
        len(twins),
        len(errors),
        middle(errors),
        ninth(errors),
        average(errors),
        middle([alone(one) for one in twins if one.run.seconds]),
        share(one.inside_interval for one in twins if one.run.seconds),
        len(weighed),
        middle(weighed),
        ninth(weighed),
        len(oom),
        sum(not one.estimate.fits for one in oom),
        sum(not one.estimate.fits for one in ran),
        len(ranks),
        average([tau for tau, _ in ranks if tau is not None]),
        average([regret for _, regret in ranks]),
        max((regret for _, regret in ranks), default=None),
    )


def alone(one: ReplayedRun) -> float:
    """The error with the constants of the nearest other software, as if this source had never been seen."""
    job = replace(one.run.job, trainer=unfitted_profile(one.run.job.trainer))
    found = estimate(job, unstated=True)
    return abs(found.seconds / one.run.seconds - 1) if one.run.seconds else 0.0


def sweeps(twins: list[ReplayedRun]) -> Iterable[list[ReplayedRun]]:
    """Runs of one source that did the same work on as many of the same devices."""
    groups: dict[Any, list[ReplayedRun]] = defaultdict(list)
    for one in twins:
        job = one.run.job
        if one.run.seconds:
            work = (job.model, job.sequence, job.batch.global_, job.precision, job.activation_checkpoint)
            groups[(family(one.run.source), job.cluster.device.name, job.layout.ranks, work)].append(one)
    return (rows for rows in groups.values() if len(rows) >= SWEEP)


def rank_sweep(rows: list[ReplayedRun]) -> tuple[float | None, float]:
    """Kendall's tau of predicted and measured seconds, none where nothing differs, and the regret of the predicted
    best; of equally good ones, the mean.
    """
    seconds = [(one.estimate.seconds, one.run.seconds or 0.0) for one in rows]
    agree = total = 0
    for place, (guess, real) in enumerate(seconds):
        for other, truth in seconds[:place]:
            if real != truth and guess != other:
                agree += 1 if (guess - other) * (real - truth) > 0 else -1
                total += 1
    least = min(guess for guess, _ in seconds)
    best = mean(real for guess, real in seconds if guess == least)
    return agree / total if total else None, best / min(real for _, real in seconds) - 1


def middle(values: list[float]) -> float | None:
    return median(values) if values else None


def average(values: list[float]) -> float | None:
    return mean(values) if values else None


def ninth(values: list[float]) -> float | None:
    return sorted(values)[min(len(values) - 1, int(0.9 * len(values)))] if values else None


def share(truths: Iterable[bool]) -> float | None:
    found = list(truths)
    return sum(found) / len(found) if found else None
