"""A cache of the estimates of one workload on one cluster: each candidate is timed and its memory estimated once."""

from __future__ import annotations

from collections.abc import Hashable

from meshwright.base.hardware.cluster import Cluster
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.planner.calibration.corrections import corrections_for
from meshwright.planner.cost.estimate import Estimate, MemoryEstimate
from meshwright.planner.cost.peak_memory import estimate_memory, rank_memory, rank_traces, ranks_that_may_peak
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.cost.trace.cost_trace import CostTrace
from meshwright.planner.cost.units.data_sharding import layout_sharding
from meshwright.planner.cost.units.stage_parameters import stages_by_rank
from meshwright.planner.search.bounds.candidate_bounds import CandidateBounds
from meshwright.planner.search.bounds.memory_bounds import MemoryBounds
from meshwright.planner.search.bounds.time_bounds import TimeBounds
from meshwright.planner.search.candidate import (
    Candidate,
    CandidateJob,
    candidate_job,
    candidate_trainer,
    trainer_key,
    validation_error,
)
from meshwright.planner.search.search_space import fills_schedule, pipeline_schedules
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.workload import Workload


class CostCache:
    def __init__(self, work: Workload, cluster: Cluster) -> None:
        self.work, self.cluster, self.corrections = work.on(cluster), cluster, corrections_for(cluster)
        self.memory_limit = (1 - work.headroom) * cluster.device.memory
        """The bytes that a plan may use: those of the device without the headroom."""
        self.time_bounds, self.memory_bounds = TimeBounds(), MemoryBounds(self.work, cluster)
        self._bounds: dict[Hashable, CandidateBounds] = {}
        self._schedules: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._least_bubbles: dict[tuple[int, int], list[tuple[int, str, int]]] = {}
        self._stage_memory: dict[Candidate, list[MemoryEstimate]] = {}
        self._exceeding: dict[Candidate, float] = {}
        """The memory of a rank that does not fit, of candidates that do not."""
        self._peak_memory: dict[Candidate, MemoryEstimate] = {}
        self._estimates: dict[Candidate, Estimate] = {}
        self._traces: dict[Candidate, list[CostTrace]] = {}
        self._unsupported: dict[Candidate, bool] = {}
        self._trainers: dict[Hashable, tuple[TrainerProfile, str]] = {}
        self._profiles: dict[tuple[TrainerProfile, str], tuple[TrainerProfile, str]] = {}

    @property
    def timed(self) -> int:
        """The candidates whose step time was estimated."""
        return len(self._estimates)

    @property
    def memory_estimates(self) -> int:
        """The candidates whose memory was estimated."""
        return len(self._stage_memory) + len(self._exceeding)

    def micro_batches(self, candidate: Candidate) -> int:
        """The micro-batches per step on one rank."""
        return self.work.global_batch // candidate.layout.data_degree // candidate.micro

    def filled_schedules(self, pipeline: int, micro_batches: int) -> list[tuple[str, int]]:
        """The schedules of a pipeline that so many micro-batches fill, as (schedule, stages per rank)."""
        key = pipeline, micro_batches
        if key not in self._schedules:
            rows = pipeline_schedules(self.work, pipeline)
            filled = [row for row in rows if fills_schedule(row[0], pipeline, micro_batches)]
            if ("1f1b", 1) in filled:
                filled = [row for row in filled if not SCHEDULES[row[0]].all_forward_first]
            self._schedules[key] = filled
        return self._schedules[key]

    def least_bubbles(self, pipeline: int, micro_batches: int) -> list[tuple[int, str, int]]:
        """The filled schedules with the smallest bubbles, as (divisor of the bubble, schedule, stages per rank): one of
        those that split backward, whose blocks are not compiled, and one of the others; of one stage per rank and of
        several, which may hide the communication of experts.
        """
        key = pipeline, micro_batches
        if key not in self._least_bubbles:
            least: dict[tuple[bool, bool], tuple[int, str, int]] = {}
            for name, stages in self.filled_schedules(pipeline, micro_batches):
                kind = SCHEDULES[name].splits_backward, stages > 1 and self.work.model.experts > 0
                row = SCHEDULES[name].bubble_divisor(stages), name, stages
                least[kind] = max(row, least.get(kind, row))
            self._least_bubbles[key] = list(least.values())
        return self._least_bubbles[key]

    def trainer(self, candidate: Candidate) -> tuple[TrainerProfile, str]:
        """The trainer's profile, and the precision of its matmuls."""
        key = trainer_key(self.work, candidate)
        if key not in self._trainers:
            trainer = candidate_trainer(self.work, self.cluster, candidate)
            self._trainers[key] = self._profiles.setdefault(trainer, trainer)  # equal profiles are one object
        return self._trainers[key]

    def job(self, candidate: Candidate) -> PlannedJob:
        """The job of a candidate, without a run configuration."""
        return candidate_job(self.work, self.cluster, candidate, self.trainer(candidate))

    def candidate_job(self, candidate: Candidate) -> CandidateJob:
        """What lower bounds need of the job."""
        trainer, precision = self.trainer(candidate)
        data_sharding = layout_sharding(candidate.layout, candidate.sharding, trainer)
        return CandidateJob(candidate, trainer, precision, self.micro_batches(candidate), data_sharding, self.job)

    def bounds(self, execution: Candidate, sharding: str, layout: Layout) -> CandidateBounds:
        """The lower bounds of an execution with a sharding, of which `layout` is one of the layouts."""
        splits_backward = SCHEDULES[execution.schedule].splits_backward
        key = (
            *(layout.pipeline, layout.data_degree, layout.context, layout.tensor, layout.expert, sharding),
            *(execution.micro, execution.activation_checkpoint, splits_backward, execution.context_method),
            *(execution.offload, execution.compile),
        )
        if key not in self._bounds:
            each = self.candidate_job(execution._replace(sharding=sharding, layout=layout))
            correction = self.correction if self.corrections.records else None
            self._bounds[key] = CandidateBounds(each, self.time_bounds, self.memory_bounds, correction)
        return self._bounds[key]

    def correction(self, candidate: Candidate, quantity: str) -> float:
        """The correction factor of a quantity, "seconds" or "memory", learned from runs on this cluster."""
        if not self.corrections.records:
            return 1.0
        return self.corrections.factor(self.job(candidate), quantity).ratio

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
            self._exceeding.pop(candidate, None)
        return self._stage_memory[candidate]

    def peak_memory(self, candidate: Candidate) -> MemoryEstimate:
        """The memory of the rank that needs the most."""
        if candidate not in self._peak_memory:
            self._peak_memory[candidate] = max(self.stage_memory(candidate), key=lambda stage: stage.total)
        return self._peak_memory[candidate]

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate fits into device memory and leaves the headroom free. Memory is estimated only if its
        lower bound fits, and only up to the first rank that does not.
        """
        if candidate in self._stage_memory:
            return self.peak_memory(candidate).total <= self.memory_limit
        if candidate in self._exceeding or not self.may_fit(candidate):
            return False
        job, traces = self.job(candidate), self.traces(candidate)
        ranks = ranks_that_may_peak(stages_by_rank(job))
        splits_backward = job.layout.pipeline > 1 and SCHEDULES[job.schedule].splits_backward
        # Inner ranks have the most layers; where backward is split, the last of them defers the most.
        inner_first = sorted(ranks, key=lambda rank: (rank in (0, len(traces) - 1), -rank if splits_backward else rank))
        memory_by_rank = []
        for rank in inner_first:
            memory_by_rank += self.corrections.correct_memory(job, [rank_memory(traces[rank], rank)])
            if memory_by_rank[-1].total > self.memory_limit:
                self._exceeding[candidate] = memory_by_rank[-1].total
                return False
        self._stage_memory[candidate] = sorted(memory_by_rank, key=lambda memory: memory.rank)
        return True

    def excess(self, candidate: Candidate) -> float | None:
        """The memory of a rank of a candidate that does not fit, relative to its lower bound; None if the bound tells
        that it does not fit.
        """
        return self._exceeding[candidate] / self.least_memory(candidate) if candidate in self._exceeding else None

    def may_fit(self, candidate: Candidate) -> bool:
        """Whether the lower bound of the candidate's memory leaves the headroom free."""
        return self.least_memory(candidate) <= self.memory_limit

    def least_memory(self, candidate: Candidate) -> float:
        """A lower bound of the memory of a candidate."""
        bounds = self.bounds(candidate, candidate.sharding, candidate.layout)
        return bounds.least_memory(candidate.schedule, candidate.stages_per_rank, candidate.layout)

    def least_seconds(self, candidate: Candidate) -> float:
        """A lower bound of the step time of a candidate."""
        bounds = self.bounds(candidate, candidate.sharding, candidate.layout)
        return bounds.least_seconds(candidate.schedule, candidate.stages_per_rank, candidate.layout)

    def least_unscheduled_seconds(self, candidate: Candidate) -> float:
        """A lower bound of the step times of a candidate on all schedules that its micro-batches fill."""
        bounds = []
        for divisor, name, stages in self.least_bubbles(candidate.layout.pipeline, self.micro_batches(candidate)):
            scheduled = candidate._replace(schedule=name, stages_per_rank=stages)
            bound = self.time_bounds.unscheduled_seconds(self.candidate_job(scheduled), divisor)
            bounds.append(bound * self.correction(scheduled, "seconds"))
        return min(bounds)

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
