"""A candidate of the search: everything that a plan decides, as a job to estimate and as a run configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.config import Batch, LayoutConfig, PipelineConfig, RunConfig
from meshwright.config.device_defaults import with_device_defaults
from meshwright.errors import ConfigError
from meshwright.models.registry import validate_family
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.workload.own_trainer import own_trainer
from meshwright.planner.workload.planned_job import PlannedJob, matmul_precision
from meshwright.planner.workload.traced_model import TracedModel
from meshwright.planner.workload.workload import Workload
from meshwright.topology import schedules
from meshwright.topology.layout import Layout
from meshwright.topology.unsupported import validate


@dataclass(frozen=True)
class Candidate:
    """One combination of layout, micro-batch size, sharding, activation checkpointing and pipeline schedule."""

    layout: Layout
    micro: int
    """The samples per micro-batch."""
    sharding: str = "none"
    activation_checkpoint: str = "none"
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    context_method: str = "ring"

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
        )

    @property
    def layout_key(self) -> tuple[Layout, str]:
        """The layout and the sharding: the ranked list has at most one plan for each."""
        return self.layout, self.sharding


def candidate_job(work: Workload, cluster: Cluster, candidate: Candidate) -> PlannedJob:
    """Returns the job without a run configuration, whose exact formulas take longer; see `exact_job`."""
    replicas = candidate.layout.data_degree
    batch = Batch(work.global_batch, candidate.micro, replicas, work.global_batch // replicas // candidate.micro)
    # A workload that cannot be trained here is planned with the defaults of the device.
    config = candidate_config(work.base_config or RunConfig(), candidate)
    config = with_device_defaults(config, cluster.device_type, traced_model(work) is not None)
    return PlannedJob(
        work.model,
        cluster,
        candidate.layout,
        batch,
        work.sequence,
        candidate.sharding,
        matmul_precision(config, cluster) if work.base_config is not None else work.precision,
        candidate.activation_checkpoint,
        1,
        candidate.schedule,
        candidate.stages_per_rank,
        candidate.context_method,
        own_trainer(config, candidate.layout, batch.accumulation),
    )


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
    return replace(base, **changed)


def traced_model(work: Workload) -> TracedModel | None:
    """The user's model of a workload, or None if it is described by an architecture."""
    return work.model if isinstance(work.model, TracedModel) else None


def exact_job(work: Workload, cluster: Cluster, candidate: Candidate) -> PlannedJob:
    """Returns the job with its run configuration if the workload has one, so that exact formulas apply."""
    if work.base_config is None:
        return candidate_job(work, cluster, candidate)
    return PlannedJob.from_config(
        candidate_config(work.base_config, candidate), cluster, work.model.name, traced_model(work)
    )


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
