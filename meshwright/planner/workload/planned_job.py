"""Defines the job that the planner estimates: model, layout and batch on a cluster, run by a trainer; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.base.config import Batch, RunConfig, derive_batch
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.hardware.cluster import Cluster
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.registry import block_costs, model_architecture
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.layout import Layout, stages_per_rank
from meshwright.base.topology.schedules import find_schedule
from meshwright.planner.workload.optimizer_bytes import ALL_TRAINED, TrainedShares, optimizer_bytes, trained_shares
from meshwright.planner.workload.own_trainer import own_trainer
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.trainer_profiles import MESHWRIGHT


def matmul_precision(config: RunConfig, cluster: Cluster) -> str:
    """The precision of the matrix products with weights, which a CPU emulates if it is float8."""
    return "fp8" if config.precision.float8 and not cluster.device.is_cpu else config.precision.compute


@dataclass(frozen=True)
class PlannedJob:
    """Everything that step time, memory and communication volume depend on."""

    model: Architecture | TracedModel
    """the model"""
    cluster: Cluster
    """the devices and links; it may have more devices than the layout uses"""
    layout: Layout
    """degrees of the mesh dimensions"""
    batch: Batch
    """global batch, micro-batch, data-parallel degree and gradient accumulation"""
    sequence: int
    """tokens per sample"""
    sharding: str = "none"
    """what is sharded over data-parallel ranks: none, optimizer, gradients or parameters (ZeRO-0 to ZeRO-3)"""
    precision: str = "bf16"
    """precision of matmuls: fp64, fp32, bf16, fp16, fp8 or fp4"""
    activation_checkpoint: str = "none"
    """activation checkpointing: none, selective, full, or alternate (full, in every other block)"""
    checkpoint_segment: int = 1
    """consecutive blocks per checkpoint; with full activation checkpointing only"""
    schedule: str = "1f1b"
    """pipeline schedule"""
    stages_per_rank: int = 1
    """pipeline stages per rank"""
    context_method: str = "ring"
    """how context-parallel ranks exchange keys and values: ring, all-to-all, or gather"""
    trainer: TrainerProfile = MESHWRIGHT
    """the software that runs the job"""
    run_config: RunConfig | None = None
    """the config of a Meshwright run, which the exact formulas need; None for other trainers"""
    expert_imbalance: float = 1.0
    """load of the busiest expert-parallel rank as a multiple of the mean; 1 for a balanced load"""
    block_costs: tuple[float, ...] | None = None
    """FLOPs of every block, by which pipeline stages are balanced; None: layers are divided evenly"""
    trained: TrainedShares = ALL_TRAINED
    """which part of the model is trained"""

    def __post_init__(self) -> None:
        find_schedule(self.schedule)  # raises ConfigError if the schedule is unknown

    @classmethod
    def from_config(
        cls, config: RunConfig, cluster: Cluster, name: str = "", traced: TracedModel | None = None
    ) -> PlannedJob:
        """Returns the job of a Meshwright run on a cluster; `traced` is a model that replaces that of the config."""
        config = with_device_defaults(config, cluster.device_type, traced is not None)
        layout = Layout.from_config(config.layout)
        return cls.of_run(config, layout, derive_batch(config.batch, layout.data_degree), cluster, name, traced)

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        layout: Layout,
        batch: Batch,
        cluster: Cluster,
        name: str = "",
        traced: TracedModel | None = None,
    ) -> PlannedJob:
        """Returns the job of a Meshwright run whose settings have their values for the device."""
        trained = trained_shares(config, traced)
        return cls(
            traced or model_architecture(config.model, name or config.preset),
            cluster,
            layout,
            batch,
            traced.sequence if traced else config.data.sequence,
            config.layout.shard,
            matmul_precision(config, cluster),
            config.activation_checkpoint.mode,
            config.activation_checkpoint.segment,
            config.pipeline.schedule,
            stages_per_rank(config),
            config.context.method,
            own_trainer(config, layout, batch.accumulation, trained),
            config,
            block_costs=block_costs(config) if traced is None and layout.pipeline > 1 else None,
            trained=trained,
        )

    @cached_property
    def optimizer_bytes(self) -> float:
        """Mean bytes of optimizer state per trained parameter, in float32."""
        return optimizer_bytes(self.trainer, self.run_config, self.model)

    @property
    def offload(self) -> bool:
        """Whether optimizer state is in host memory, where the update runs."""
        return self.trainer.offloads_optimizer

    @property
    def is_quantized(self) -> bool:
        """Whether matmuls of blocks run in 8 bits or fewer, beside others in 16."""
        return self.precision in ("fp8", "fp4")

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all ranks."""
        return self.batch.global_ * self.sequence

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens of one micro-batch on one rank; context parallelism divides the sequence."""
        return self.batch.micro * self.sequence // self.layout.context
