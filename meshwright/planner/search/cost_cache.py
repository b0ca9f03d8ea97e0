"""A cache of the estimates of one workload on one cluster: each candidate is timed and its memory estimated once."""

from __future__ import annotations

from collections.abc import Hashable

from meshwright.planner.calibration.corrections import corrections_for
from meshwright.planner.cost.estimate import Estimate, MemoryEstimate
from meshwright.planner.cost.peak_memory import estimate_memory, rank_traces
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.cost.trace.cost_trace import CostTrace
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.search.candidate import (
    Candidate,
    candidate_job,
    candidate_trainer,
    trainer_key,
    validation_error,
)
from meshwright.planner.search.memory_bounds import MemoryBounds
from meshwright.planner.search.time_bounds import TimeBounds
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.workload import Workload


class CostCache:
    def __init__(self, work: Workload, cluster: Cluster) -> None:
        self.work, self.cluster, self.corrections = work.on(cluster), cluster, corrections_for(cluster)
        self.memory_limit = (1 - work.headroom) * cluster.device.memory
        """The bytes that a plan may use: those of the device without the headroom."""
        self.time_bounds, self.memory_bounds = TimeBounds(), MemoryBounds(self.work)
        self.filled_schedules: dict[tuple[int, int], list[tuple[str, int]]] = {}
        """The schedules of a pipeline degree that a number of micro-batches fills."""
        self._stage_memory: dict[Candidate, list[MemoryEstimate]] = {}
        self._peak_memory: dict[Candidate, MemoryEstimate] = {}
        self._estimates: dict[Candidate, Estimate] = {}
        self._traces: dict[Candidate, list[CostTrace]] = {}
        self._unsupported: dict[Candidate, bool] = {}
        self._least_seconds: dict[Candidate, float] = {}
        self._trainers: dict[Hashable, tuple[TrainerProfile, str]] = {}
        self._profiles: dict[tuple[TrainerProfile, str], tuple[TrainerProfile, str]] = {}

    @property
    def timed(self) -> int:
        """The candidates whose step time was estimated."""
        return len(self._estimates)

    @property
    def memory_estimates(self) -> int:
        """The candidates whose memory was estimated."""
        return len(self._stage_memory)

    def job(self, candidate: Candidate) -> PlannedJob:
        """The job of a candidate, without a run configuration."""
        key = trainer_key(self.work, candidate)
        if key not in self._trainers:
            trainer = candidate_trainer(self.work, self.cluster, candidate)
            self._trainers[key] = self._profiles.setdefault(trainer, trainer)  # equal profiles are one object
        return candidate_job(self.work, self.cluster, candidate, self._trainers[key])

    def traces(self, candidate: Candidate) -> list[CostTrace]:
        """The traces of the candidate's pipeline ranks."""
        if candidate not in self._traces:
            self._traces[candidate] = rank_traces(self.job(candidate))
        return self._traces[candidate]

    def stage_memory(self, candidate: Candidate) -> list[MemoryEstimate]:
        """The memory of one rank per pipeline stage."""
        if candidate not in self._stage_memory:
            job = self.job(candidate)
            memory = estimate_memory(job, quick=True, traces=self.traces(candidate))
            self._stage_memory[candidate] = self.corrections.correct_memory(job, memory)
        return self._stage_memory[candidate]

    def peak_memory(self, candidate: Candidate) -> MemoryEstimate:
        """The memory of the rank that needs the most."""
        if candidate not in self._peak_memory:
            self._peak_memory[candidate] = max(self.stage_memory(candidate), key=lambda stage: stage.total)
        return self._peak_memory[candidate]

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate fits into device memory and leaves the headroom free; peak memory is estimated only if
        its lower bound fits.
        """
        if candidate in self._peak_memory:
            return self._peak_memory[candidate].total <= self.memory_limit
        return self.may_fit(candidate) and self.peak_memory(candidate).total <= self.memory_limit

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether the lower bound of the candidate's memory leaves the headroom free."""
        return self.least_memory(candidate) <= self.memory_limit

    def least_memory(self, candidate: Candidate) -> float:
        """A lower bound of the memory of a candidate."""
        job = self.job(candidate)
        return self.memory_bounds.memory(candidate, job) * min(1.0, self.corrections.factor(job, "memory").ratio)

    def was_estimated(self, candidate: Candidate) -> bool:
        """Whether the memory of a candidate was estimated."""
        return candidate in self._stage_memory

    def least_seconds(self, candidate: Candidate) -> float:
        """A lower bound of the step time of a candidate."""
        if candidate not in self._least_seconds:
            job = self.job(candidate)
            correction = self.corrections.factor(job, "seconds").ratio
            self._least_seconds[candidate] = self.time_bounds.seconds(candidate, job) * correction
        return self._least_seconds[candidate]

    def estimate(self, candidate: Candidate) -> Estimate:
        """The step time and the memory, with the corrections learned from runs on this cluster."""
        if candidate not in self._estimates:
            self._estimates[candidate] = self.corrections.correct_estimate(
                estimate_step(self.job(candidate), self.stage_memory(candidate), traces=self.traces(candidate))
            )
        return self._estimates[candidate]

    def is_unsupported(self, candidate: Candidate) -> bool:
        if candidate not in self._unsupported:
            self._unsupported[candidate] = validation_error(self.work, candidate) is not None
        return self._unsupported[candidate]
