"""A candidate of the search: everything that a plan decides, as a job to estimate and as a run configuration."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

from meshwright.base.config import Batch, LayoutConfig, PipelineConfig, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.hardware.cluster import Cluster
from meshwright.base.models.registry import validate_family
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology import schedules
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import uses_ddp
from meshwright.base.topology.unsupported import validate
from meshwright.errors import ConfigError
from meshwright.planner.cost.units.data_sharding import DataSharding
from meshwright.planner.workload.own_trainer import own_trainer
from meshwright.planner.workload.planned_job import PlannedJob, matmul_precision
from meshwright.planner.workload.trainer_profile import TrainerProfile, with_matmul_precision
from meshwright.planner.workload.trainer_profiles import MESHWRIGHT, MESHWRIGHT_COMPILED
from meshwright.planner.workload.workload import Workload


class Candidate(NamedTuple):
    """One combination of layout, micro-batch size, sharding, activation checkpointing and pipeline schedule."""

    layout: Layout
    micro: int
    """The samples per micro-batch."""
    sharding: str = "none"
    activation_checkpoint: str = "none"
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    context_method: str = "ring"
    offload: bool = False
    """Whether optimizer state is in host memory."""
    compile: bool | None = None
    """Whether blocks are compiled; None is the default of the device."""

    @classmethod
    def from_job(cls, job: PlannedJob) -> Candidate:
        return cls(
            job.layout,
            job.batch.micro,
            job.sharding,
            job.activation_checkpoint,
            job.schedule,
            job.stages_per_rank,
            job.context_method,
            job.offload,
            compile_setting(job),
        )

    @property
    def layout_key(self) -> tuple[Layout, str]:
        """The layout and the sharding: the ranked list has at most one plan for each."""
        return self.layout, self.sharding


def compile_setting(job: PlannedJob) -> bool | None:
    """Returns whether a job is compiled, or None if that is the default of its device or the trainer is another."""
    trainer, layout = job.trainer, job.layout
    if trainer.name not in (MESHWRIGHT.name, MESHWRIGHT_COMPILED.name):
        return None
    splits_backward = layout.pipeline > 1 and schedules.find_schedule(job.schedule).splits_backward
    replaces_attention = isinstance(job.model, TracedModel) and layout.context > 1
    default = not job.cluster.device.is_cpu and not splits_backward and not replaces_attention
    return None if trainer.fused_kernels == default else trainer.fused_kernels


def candidate_trainer(work: Workload, cluster: Cluster, candidate: Candidate) -> tuple[TrainerProfile, str]:
    """Returns the profile of the trainer of a candidate, and the precision of its matmuls."""
    if work.trainer is not None:
        profile = with_matmul_precision(work.trainer, work.precision)
        return replace(profile, offloads_optimizer=candidate.offload), work.precision
    # A workload that cannot be trained here is planned with the defaults of the device.
    config = candidate_config(work.base_config or RunConfig(), candidate)
    config = with_device_defaults(config, cluster.device_type, traced_model(work) is not None)
    precision = matmul_precision(config, cluster) if work.base_config is not None else work.precision
    micro_steps = work.global_batch // candidate.layout.data_degree // candidate.micro
    return own_trainer(config, candidate.layout, micro_steps, work.trained), precision


def trainer_key(work: Workload, candidate: Candidate) -> Hashable:
    """Returns everything of a candidate that `candidate_trainer` depends on."""
    layout = candidate.layout
    micro_steps = work.global_batch // layout.data_degree // candidate.micro
    schedule = candidate.schedule if layout.pipeline > 1 else ""
    groups = uses_ddp(layout), layout.data_degree > 1, layout.context > 1
    return *groups, schedule, micro_steps > 1, candidate.offload, candidate.compile


def candidate_job(
    work: Workload, cluster: Cluster, candidate: Candidate, trainer: tuple[TrainerProfile, str] | None = None
) -> PlannedJob:
    """Returns the job without a run configuration, whose exact formulas take longer; see `exact_job`. `trainer` is what
    `candidate_trainer` returned for a candidate with the same key.
    """
    replicas = candidate.layout.data_degree
    batch = Batch(work.global_batch, candidate.micro, replicas, work.global_batch // replicas // candidate.micro)
    profile, precision = trainer or candidate_trainer(work, cluster, candidate)
    return PlannedJob(
        work.model,
        cluster,
        candidate.layout,
        batch,
        work.sequence,
        candidate.sharding,
        precision,
        candidate.activation_checkpoint,
        1,
        candidate.schedule,
        candidate.stages_per_rank,
        candidate.context_method,
        profile,
        expert_imbalance=work.imbalance(candidate.layout.expert),
        block_costs=work.block_costs if candidate.layout.pipeline > 1 else None,
        trained=work.trained,
    )


class CandidateJob(NamedTuple):
    """What lower bounds need of the job of a candidate, which takes longer to make. Candidates share it that differ in
    the size of their shard groups, and in their schedules as far as all of these split backward, or none.
    """

    candidate: Candidate
    trainer: TrainerProfile
    precision: str
    micro_batches: int
    """per step on one rank"""
    data_sharding: DataSharding
    make: Callable[[Candidate], PlannedJob]

    def member(self, schedule: str, stages: int, layout: Layout | None = None) -> Candidate:
        """The candidate with a schedule and a layout."""
        layout = layout or self.candidate.layout
        return self.candidate._replace(schedule=schedule, stages_per_rank=stages, layout=layout)


def candidate_config(base: RunConfig, candidate: Candidate) -> RunConfig:
    """Returns `base` with the layout and the other settings that the candidate decides."""
    layout = candidate.layout
    is_sharded = candidate.sharding != "none"
    is_hybrid = is_sharded and layout.replicate > 1
    sharding: Any = candidate.sharding
    schedule: Any = candidate.schedule
    context_method: Any = candidate.context_method if layout.context > 1 else "ring"
    mode: Any = candidate.activation_checkpoint
    changed: dict[str, Any] = {
        "layout": LayoutConfig(
            layout.shard if is_sharded and not is_hybrid else layout.replicate,
            sharding,
            layout.shard if is_hybrid else None,
            layout.tensor,
            layout.pipeline,
            layout.context,
            layout.expert,
        ),
        "batch": replace(base.batch, micro=candidate.micro),
        "pipeline": PipelineConfig(schedule, candidate.stages_per_rank) if layout.pipeline > 1 else PipelineConfig(),
        "context": replace(base.context, method=context_method),
        "activation_checkpoint": replace(base.activation_checkpoint, mode=mode, segment=1),
    }
    if candidate.offload != base.optimizer.cpu_offload:
        changed["optimizer"] = replace(base.optimizer, cpu_offload=candidate.offload)
    if candidate.compile is not None:
        changed["compile"] = replace(base.compile, enabled=candidate.compile)
    return replace(base, **changed)


def traced_model(work: Workload) -> TracedModel | None:
    """The user's model of a workload, or None if it is described by an architecture."""
    return work.model if isinstance(work.model, TracedModel) else None


def exact_job(work: Workload, cluster: Cluster, candidate: Candidate) -> PlannedJob:
    """Returns the job with its run configuration if the workload has one, so that exact formulas apply."""
    if work.base_config is None:
        return candidate_job(work, cluster, candidate)
    config = candidate_config(work.base_config, candidate)
    job = PlannedJob.from_config(config, cluster, work.model.name, traced_model(work))
    return replace(job, expert_imbalance=work.imbalance(candidate.layout.expert))


def validation_error(work: Workload, candidate: Candidate) -> ConfigError | None:
    """Returns the error with which Meshwright, or a trainer with the usual rules, rejects the candidate."""
    try:
        if work.base_config is not None:
            config, own_model = candidate_config(work.base_config, candidate), traced_model(work) is not None
            validate(config, own_model=own_model)
            if not own_model:
                validate_family(config)
        elif candidate.layout.pipeline > 1:
            micro_batches = work.global_batch // (candidate.layout.data_degree * candidate.micro)
            schedules.validate_schedule(
                candidate.schedule, candidate.layout.pipeline, micro_batches, candidate.stages_per_rank
            )
    except ConfigError as error:
        return error
    return None
