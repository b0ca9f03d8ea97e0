"""What is estimated: a model on a cluster, spread, cut into batches, and run by some software; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.config import Batch, RunConfig, derive_batch
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.workload.architecture import Architecture
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.trainer_profiles import MESHWRIGHT, MESHWRIGHT_COMPILED
from meshwright.topology.layout import Layout, stages_per_rank


@dataclass(frozen=True)
class PlannedJob:
    model: Architecture
    cluster: Cluster
    layout: Layout
    batch: Batch
    sequence: int
    sharding: str = "none"
    """none, optimizer, gradients or parameters"""
    precision: str = "bf16"
    """fp64, fp32, bf16, fp16, fp8 or fp4"""
    activation_checkpoint: str = "none"
    """none, selective or full"""
    checkpoint_segment: int = 1
    """full: blocks that are recomputed together"""
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    """of the pipeline, a rank"""
    context_method: str = "ring"
    """of context: ring, all-to-all, or gather"""
    trainer: TrainerProfile = MESHWRIGHT
    run_config: RunConfig | None = None
    """the run that it was made of, of which exact formulas know more"""

    @classmethod
    def from_config(cls, config: RunConfig, cluster: Cluster, name: str = "") -> PlannedJob:
        layout = Layout.from_config(config.layout)
        return cls(
            Architecture.from_config(config.model, name or config.preset),
            cluster,
            layout,
            derive_batch(config.batch, layout.data_degree),
            config.data.sequence,
            config.layout.shard,
            config.precision.compute,
            config.activation_checkpoint.mode,
            config.activation_checkpoint.segment,
            config.pipeline.schedule,
            stages_per_rank(config),
            config.context.method,
            MESHWRIGHT_COMPILED if config.compile.enabled else MESHWRIGHT,
            config,
        )

    @property
    def tokens_per_step(self) -> int:
        """of a step, over all ranks"""
        return self.batch.global_ * self.sequence

    @property
    def tokens_per_micro_batch(self) -> int:
        """that one rank of the context axis computes on in one micro-step"""
        return self.batch.micro * self.sequence // self.layout.context
