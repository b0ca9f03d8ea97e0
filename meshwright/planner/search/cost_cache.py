"""A cache of the estimates of one workload on one cluster: each candidate is timed and its memory estimated once."""

from __future__ import annotations

from meshwright.planner.calibration.corrections import corrections_for
from meshwright.planner.cost.estimate import Estimate, MemoryEstimate
from meshwright.planner.cost.peak_memory import estimate_memory
from meshwright.planner.cost.step_time import estimate_step
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.search.candidate import Candidate, candidate_job, validation_error
from meshwright.planner.workload.optimizer_bytes import optimizer_bytes, trainable_fraction
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.workload import Workload


class CostCache:
    def __init__(self, work: Workload, cluster: Cluster) -> None:
        self.work, self.cluster, self.corrections = work.on(cluster), cluster, corrections_for(cluster)
        self._stage_memory: dict[Candidate, list[MemoryEstimate]] = {}
        self._peak_memory: dict[Candidate, MemoryEstimate] = {}
        self._optimistic: dict[Candidate, Estimate] = {}
        self._estimates: dict[Candidate, Estimate] = {}
        self._unsupported: dict[Candidate, bool] = {}

    @property
    def timed(self) -> int:
        """The candidates whose step time was estimated."""
        return len({*self._optimistic, *self._estimates})

    @property
    def memory_estimates(self) -> int:
        """The candidates whose memory was estimated."""
        return len(self._stage_memory)

    def stage_memory(self, candidate: Candidate) -> list[MemoryEstimate]:
        """The memory of one rank per pipeline stage."""
        if candidate not in self._stage_memory:
            job = candidate_job(self.work, self.cluster, candidate)
            self._stage_memory[candidate] = self.corrections.correct_memory(job, estimate_memory(job, quick=True))
        return self._stage_memory[candidate]

    def peak_memory(self, candidate: Candidate) -> MemoryEstimate:
        """The memory of the rank that needs the most."""
        if candidate not in self._peak_memory:
            self._peak_memory[candidate] = max(self.stage_memory(candidate), key=lambda stage: stage.total)
        return self._peak_memory[candidate]

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate fits into device memory; peak memory is estimated only if the model state fits."""
        capacity = self.cluster.device.memory
        trainer = candidate_job(self.work, self.cluster, candidate).trainer
        return (
            min_state_bytes(self.work, candidate, trainer) <= capacity and self.peak_memory(candidate).total <= capacity
        )

    def optimistic_estimate(self, candidate: Candidate) -> Estimate:
        """The step time as if memory were unlimited."""
        if candidate not in self._optimistic:
            self._optimistic[candidate] = estimate_step(candidate_job(self.work, self.cluster, candidate), [])
        return self._optimistic[candidate]

    def estimate(self, candidate: Candidate) -> Estimate:
        """The step time and the memory, with the corrections learned from runs on this cluster."""
        if candidate not in self._estimates:
            job = candidate_job(self.work, self.cluster, candidate)
            self._estimates[candidate] = self.corrections.correct_estimate(
                estimate_step(job, self.stage_memory(candidate))
            )
        return self._estimates[candidate]

    def is_unsupported(self, candidate: Candidate) -> bool:
        if candidate not in self._unsupported:
            self._unsupported[candidate] = validation_error(self.work, candidate) is not None
        return self._unsupported[candidate]


def min_state_bytes(work: Workload, candidate: Candidate, profile: TrainerProfile) -> float:
    """Returns a lower bound of a rank's parameters, gradients and optimizer state: everything divides evenly."""
    model, layout = work.model, candidate.layout
    expert_parameters = model.all_expert_parameters
    dense_parameters = model.parameters - expert_parameters
    parameters = (dense_parameters + expert_parameters / layout.expert) / layout.tensor / layout.pipeline
    shard_ranks = layout.shard * layout.context if candidate.sharding != "none" else 1
    offloaded = work.base_config is not None and work.base_config.optimizer.cpu_offload
    optimizer = 0.0 if offloaded else optimizer_bytes(profile, work.base_config, model)
    gradients = profile.gradient_bytes * trainable_fraction(work.base_config, model)
    total = profile.parameter_bytes + gradients + optimizer
    sharded = {"optimizer": optimizer, "gradients": optimizer + gradients, "parameters": total}.get(
        candidate.sharding, 0.0
    )
    return parameters * (total - sharded + sharded / shard_ranks)
