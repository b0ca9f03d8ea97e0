"""Scores the planner: predicts every run of a file of published runs, and compares it with what was measured.

| score | of |
|---|---|
| median, 90th percentile and mean error | absolute relative error of the step time |
| source left out, device left out | median error with constants fitted without the source, or without the device |
| inside | fraction of runs that are inside their 80 % interval |
| memory median and 90th percentile | absolute relative error of memory, of the kind that the source reports |
| memory bias | median of the signed relative error of memory |
| out of memory | runs that ran out of memory, and those of them that are predicted not to fit |
| false out of memory | runs that ran, and are predicted not to fit, of those whose settings were not assumed to fit |
| Kendall tau, regret | over sweeps (the same work on several layouts): rank correlation, and the cost of the choice |
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, exp, hypot, log
from pathlib import Path
from statistics import mean, median
from typing import Any

from meshwright.planner.calibration.estimator import estimate
from meshwright.planner.calibration.leave_one_out import LeftOut, chip, leave_one_out
from meshwright.planner.calibration.published.published_runs import OUT_OF_RANGE, PublishedRun, read_published_runs
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.workload.planned_job import PlannedJob

MIN_SWEEP_RUNS = 3
"""Number of runs of the same work that make a sweep."""
SPREAD_SHARE = 0.35
"""The share of the largest difference between plausible values of an unstated setting that its 80 % interval covers."""


@dataclass(frozen=True)
class ReplayedRun:
    """A published run and its estimate."""

    run: PublishedRun
    estimate: Estimate

    @property
    def error(self) -> float | None:
        """Relative error of the step time; 0.1 means 10 % too long."""
        return self.estimate.seconds / self.run.seconds - 1 if self.run.seconds else None

    @property
    def predicted_memory(self) -> float:
        """Predicted memory in bytes, of the kind that the source reports."""
        memory = self.estimate.peak_memory
        return {"total": memory.total, "reserved": memory.reserved, "tensors": memory.tensors}[self.run.memory_kind]

    @property
    def memory_error(self) -> float | None:
        """Relative error of memory."""
        return self.predicted_memory / self.run.memory - 1 if self.run.memory else None

    @property
    def fits(self) -> bool:
        """Whether the run is predicted to run, even if the allocator has to return its slack."""
        needed = self.estimate.peak_memory.required - self.run.offloaded
        return needed <= self.estimate.job.cluster.device.memory

    @property
    def inside_interval(self) -> bool:
        """Whether the measured step time is inside the 80 % interval."""
        seconds = self.run.seconds
        return seconds is not None and self.estimate.interval_low <= seconds <= self.estimate.interval_high


@dataclass(frozen=True)
class SourceScore:
    """The errors over the runs of one source; fractions, and None if there is nothing to score."""

    source: str
    runs: int
    """number of runs"""
    timed_runs: int
    """runs with a measured step time"""
    median_error: float | None
    """median of the absolute step-time error"""
    p90_error: float | None
    """90th percentile of the absolute step-time error"""
    mean_error: float | None
    """mean of the absolute step-time error"""
    source_left_out: float | None
    """median error with constants that were fitted without the source of each run; None if it was not asked for"""
    device_left_out: float | None
    """median error with constants that were fitted without the device of each run; None if it was not asked for"""
    inside_interval: float | None
    """fraction of runs inside their 80 % interval"""
    memory_runs: int
    """runs with measured memory"""
    memory_median_error: float | None
    """median of the absolute memory error"""
    memory_p90_error: float | None
    """90th percentile of the absolute memory error"""
    memory_bias: float | None
    """median of the signed memory error"""
    out_of_memory: int
    """runs that failed for lack of memory"""
    out_of_memory_found: int
    """those of them that are predicted not to fit"""
    completed_runs: int
    """runs that ran, without those whose settings were assumed such that they fit"""
    false_out_of_memory: int
    """those of them that are predicted not to fit"""
    sweeps: int
    """sets of at least MIN_SWEEP_RUNS runs of the same work on different layouts"""
    kendall_tau: float | None
    """rank correlation of predicted and measured step time, mean over sweeps"""
    mean_regret: float | None
    """extra time of the layout that is predicted to be the fastest, mean over sweeps"""
    max_regret: float | None
    """the largest regret of a sweep"""

    def to_json(self) -> dict[str, Any]:
        """Returns the score under the keys of `plan --replay --json`, which stay the same between versions."""
        return {
            "source": self.source,
            "runs": self.runs,
            "timed": self.timed_runs,
            "median": self.median_error,
            "percentile_90": self.p90_error,
            "mean": self.mean_error,
            "source_left_out": self.source_left_out,
            "device_left_out": self.device_left_out,
            "inside": self.inside_interval,
            "memory_runs": self.memory_runs,
            "memory_median": self.memory_median_error,
            "memory_percentile_90": self.memory_p90_error,
            "memory_bias": self.memory_bias,
            "out_of_memory": self.out_of_memory,
            "out_of_memory_found": self.out_of_memory_found,
            "completed_runs": self.completed_runs,
            "false_out_of_memory": self.false_out_of_memory,
            "sweeps": self.sweeps,
            "tau": self.kendall_tau,
            "regret": self.mean_regret,
            "max_regret": self.max_regret,
        }


def replay_run(run: PublishedRun) -> ReplayedRun:
    """Predicts one run. The spread over what its unstated settings may have been widens its interval."""
    predicted = estimate(run.job)
    spreads = [SPREAD_SHARE * spread(predicted, alternatives) for alternatives in run.alternatives]
    if not spreads:
        return ReplayedRun(run, predicted)
    width = hypot(log(predicted.interval_high / predicted.seconds), *spreads)
    low, high = predicted.seconds * exp(-width), predicted.seconds * exp(width)
    return ReplayedRun(run, replace(predicted, interval_low=low, interval_high=high))


def spread(predicted: Estimate, alternatives: Iterable[PlannedJob]) -> float:
    """Returns the largest difference that another value of a setting makes, in the logarithm of the step time."""
    return max(abs(log(estimate_step(job, []).seconds / predicted.seconds)) for job in alternatives)


def replay(path: Path, leaves_out: bool = False) -> dict[str, Any]:
    """Predicts all runs of a file; with `leaves_out`, also with constants that were fitted without each run's source.

    Returns a JSON object: scores by source and in total, one record per run, and the reason for each excluded run.
    """
    runs, excluded = read_published_runs(path)
    flagged = [run.name for run in runs if run.flagged]
    replayed = []
    for run in runs:
        if run.flagged:
            continue
        try:
            replayed.append(replay_run(run))
        except (ArithmeticError, ValueError):
            excluded[run.name] = OUT_OF_RANGE
    timed = [one.run for one in timed_runs(replayed)]
    by_source_left_out = leave_one_out(timed, lambda run: publisher(run.source)) if leaves_out else {}
    by_device_left_out = leave_one_out(timed, lambda run: chip(run.job.cluster.device.name)) if leaves_out else {}
    by_source: dict[str, list[ReplayedRun]] = defaultdict(list)
    for one in replayed:
        by_source[publisher(one.run.source)].append(one)
    groups = [*sorted(by_source.items())]
    groups.append(("fully stated", [one for one in replayed if one.run.fully_stated]))
    groups.append(("all", replayed))
    scores = [score(source, members, by_source_left_out, by_device_left_out) for source, members in groups]
    return {
        "file": str(path),
        "scores": [one.to_json() for one in scores],
        "left_out": excluded | dict.fromkeys(flagged, "its source or its collector doubts the numbers"),
        "records": [run_json(one) for one in replayed],
    }


def run_json(replayed: ReplayedRun) -> dict[str, Any]:
    """Returns one run under the keys of `plan --replay --json`, which stay the same between versions."""
    run, predicted = replayed.run, replayed.estimate
    return {
        "id": run.name,
        "software": predicted.job.trainer.name,
        "assumed": list(run.assumptions),
        "derived": list(run.derived),
        "seconds": {
            "predicted": predicted.seconds,
            "low": predicted.interval_low,
            "high": predicted.interval_high,
            "measured": run.seconds,
        },
        "memory": {"predicted": replayed.predicted_memory, "measured": run.memory, "counted": run.memory_kind},
        "fits": replayed.fits,
        "phases": predicted.phases,
    }


def publisher(source: str) -> str:
    """Returns who published a run: the part of its source before the first file, table or row."""
    return re.split(r"[ ,(]", source.replace("repo train", "repo/train"), maxsplit=1)[0].split("/docs")[0]


def score(source: str, replayed: list[ReplayedRun], source_left_out: LeftOut, device_left_out: LeftOut) -> SourceScore:
    """Scores the runs of one source; `source_left_out` and `device_left_out` are errors by the name of the run."""
    errors = [abs(one.error) for one in replayed if one.error is not None]
    signed_memory_errors = [one.memory_error for one in replayed if one.memory_error is not None]
    memory_errors = [abs(error) for error in signed_memory_errors]
    out_of_memory = [one for one in replayed if one.run.out_of_memory]
    ran = [one for one in timed_runs(replayed) if not (one.run.out_of_memory or one.run.made_to_fit)]
    timed = timed_runs(replayed)
    ranks = [rank_sweep(sweep) for sweep in find_sweeps(replayed)]
    return SourceScore(
        source,
        runs=len(replayed),
        timed_runs=len(errors),
        median_error=median(errors) if errors else None,
        p90_error=percentile_90(errors),
        mean_error=mean_or_none(errors),
        source_left_out=left_out_median(timed, source_left_out),
        device_left_out=left_out_median(timed, device_left_out),
        inside_interval=sum(one.inside_interval for one in timed) / len(timed) if timed else None,
        memory_runs=len(memory_errors),
        memory_median_error=median(memory_errors) if memory_errors else None,
        memory_p90_error=percentile_90(memory_errors),
        memory_bias=median(signed_memory_errors) if signed_memory_errors else None,
        out_of_memory=len(out_of_memory),
        out_of_memory_found=sum(not one.fits for one in out_of_memory),
        completed_runs=len(ran),
        false_out_of_memory=sum(not one.fits for one in ran),
        sweeps=len(ranks),
        kendall_tau=mean_or_none([tau for tau, _ in ranks if tau is not None]),
        mean_regret=mean_or_none([regret for _, regret in ranks]),
        max_regret=max((regret for _, regret in ranks), default=None),
    )


def timed_runs(replayed: list[ReplayedRun]) -> list[ReplayedRun]:
    """Returns the runs with a measured step time."""
    return [one for one in replayed if one.run.seconds]


def left_out_median(timed: list[ReplayedRun], errors: LeftOut) -> float | None:
    """Returns the median of the absolute errors of these runs; None if there is none."""
    known = [abs(errors[one.run.name]) for one in timed if one.run.name in errors]
    return median(known) if known else None


def find_sweeps(replayed: list[ReplayedRun]) -> list[list[ReplayedRun]]:
    """Groups the runs of one source that did the same work on the same number of the same devices."""
    groups: dict[Any, list[ReplayedRun]] = defaultdict(list)
    for one in timed_runs(replayed):
        job = one.run.job
        work = (job.model, job.sequence, job.batch.global_, job.precision, job.activation_checkpoint)
        groups[(publisher(one.run.source), job.cluster.device.name, job.layout.ranks, work)].append(one)
    return [group for group in groups.values() if len(group) >= MIN_SWEEP_RUNS]


def rank_sweep(sweep: list[ReplayedRun]) -> tuple[float | None, float]:
    """Returns Kendall's tau of predicted and measured step time, and the regret of the predicted best.

    Tau is None if all runs are tied. If several layouts are predicted to be equally fast, the regret is that of their
    mean.
    """
    times = [(one.estimate.seconds, one.run.seconds or 0.0) for one in sweep]
    concordance = pairs = 0
    for index, (predicted, measured) in enumerate(times):
        for other_predicted, other_measured in times[:index]:
            if measured != other_measured and predicted != other_predicted:
                concordant = (predicted - other_predicted) * (measured - other_measured) > 0
                concordance += 1 if concordant else -1
                pairs += 1
    best_predicted = min(predicted for predicted, _ in times)
    chosen = mean(measured for predicted, measured in times if predicted == best_predicted)
    return concordance / pairs if pairs else None, chosen / min(measured for _, measured in times) - 1


def mean_or_none(values: list[float]) -> float | None:
    return mean(values) if values else None


def percentile_90(values: Iterable[float]) -> float | None:
    """Returns the nearest-rank 90th percentile: the smallest value that at least 90 % do not exceed."""
    ordered = sorted(values)
    return ordered[ceil(9 * len(ordered) / 10) - 1] if ordered else None
