"""One way to spread a step: everything that a plan decides, as a job to estimate and as a run to start; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from meshwright.config import Batch, LayoutConfig, PipelineConfig, RunConfig
from meshwright.errors import ConfigError
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profiles import MESHWRIGHT, MESHWRIGHT_COMPILED
from meshwright.planner.workload.workload import Workload
from meshwright.topology import schedules
from meshwright.topology.layout import Layout
from meshwright.topology.unsupported import validate


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    micro: int
    sharding: str = "none"
    recompute: str = "none"
    schedule: str = "1f1b"
    stages: int = 1
    method: str = "ring"

    @classmethod
    def of(cls, job: PlannedJob) -> Candidate:
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
        """What the ranked list has one of each of."""
        return self.layout, self.sharding


def candidate_job(work: Workload, cluster: Cluster, choice: Candidate) -> PlannedJob:
    """Without a run, whose exact formulas take longer: `exact` is for the few that are shown."""
    replicas = choice.layout.data_degree
    compiled = work.base_config is not None and work.base_config.compile.enabled
    return PlannedJob(
        work.model,
        cluster,
        choice.layout,
        Batch(work.global_batch, choice.micro, replicas, work.global_batch // replicas // choice.micro),
        work.sequence,
        choice.sharding,
        work.precision,
        choice.recompute,
        1,
        choice.schedule,
        choice.stages,
        choice.method,
        MESHWRIGHT_COMPILED if compiled else MESHWRIGHT,
    )


def candidate_config(base: RunConfig, choice: Candidate) -> RunConfig:
    """The run that trains as the plan says."""
    layout = choice.layout
    divided = choice.sharding != "none"
    both = divided and layout.replicate > 1
    pipelined = layout.pipeline > 1
    sharding: Any = choice.sharding
    order: Any = choice.schedule
    method: Any = choice.method if layout.context > 1 else "ring"
    recompute: Any = choice.recompute
    changed: dict[str, Any] = {
        "layout": LayoutConfig(
            layout.shard if divided and not both else layout.replicate,
            sharding,
            layout.shard if both else None,
            layout.tensor,
            layout.pipeline,
            layout.context,
            layout.expert,
        ),
        "batch": replace(base.batch, micro=choice.micro),
        "pipeline": PipelineConfig(order, choice.stages) if pipelined else PipelineConfig(),
        "context": replace(base.context, method=method),
        "activation_checkpoint": replace(base.activation_checkpoint, mode=recompute, segment=1),
    }
    return replace(base, **changed)


def exact_job(work: Workload, cluster: Cluster, choice: Candidate) -> PlannedJob:
    """With the run where there is one."""
    if work.base_config is None:
        return candidate_job(work, cluster, choice)
    return PlannedJob.from_config(candidate_config(work.base_config, choice), cluster, work.model.name)


def validation_error(work: Workload, choice: Candidate) -> ConfigError | None:
    """Why meshwright, or a trainer with the usual rules, would not run it."""
    try:
        if work.base_config is not None:
            validate(candidate_config(work.base_config, choice))
        elif choice.layout.pipeline > 1:
            replicas = choice.layout.data_degree * choice.micro
            schedules.validate_schedule(
                choice.schedule, choice.layout.pipeline, work.global_batch // replicas, choice.stages
            )
    except ConfigError as refused:
        return refused
    return None
