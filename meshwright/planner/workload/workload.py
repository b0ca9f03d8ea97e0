"""Defines what is to be trained, before a layout is chosen; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.config import RunConfig
from meshwright.models.architecture import Architecture
from meshwright.planner.hardware.cluster import Cluster
from meshwright.planner.workload.traced_model import TracedModel

SEARCHED_KEYS = (
    "layout.replicate",
    "layout.shard",
    "layout.shard_degree",
    "layout.tensor",
    "layout.pipeline",
    "layout.context",
    "layout.expert",
    "pipeline.schedule",
    "pipeline.stages",
    "context.method",
    "activation_checkpoint.mode",
    "batch.micro",
)
"""Config keys that the search chooses, unless an option pins them."""


@dataclass(frozen=True)
class Workload:
    """The model, batch and precision for which a layout is searched."""

    model: Architecture | TracedModel
    """the model"""
    global_batch: int
    """samples per step over all ranks"""
    sequence: int
    """tokens per sample"""
    precision: str = "bf16"
    """precision of matmuls; auto: that of the device"""
    base_config: RunConfig | None = None
    """the config whose layout is searched; None if Meshwright's decoder cannot train this model or precision"""
    pinned: Mapping[str, int | str] = field(default_factory=dict)
    """values of those SEARCHED_KEYS that the search must keep"""
    notes: tuple[str, ...] = ()
    """assumptions that were made because an option was not given"""

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all ranks."""
        return self.global_batch * self.sequence

    def on(self, cluster: Cluster) -> Workload:
        """Returns this workload with the precision that it has on the devices of a cluster."""
        if self.precision != "auto":
            return self
        return replace(self, precision="fp32" if cluster.device.is_cpu else "bf16")

    def with_size(self, global_batch: int | None = None, sequence: int | None = None) -> Workload:
        """Returns the same workload, and the same base config, with another batch or sequence length."""
        global_batch, sequence = global_batch or self.global_batch, sequence or self.sequence
        base_config = self.base_config and replace(
            self.base_config,
            batch=replace(self.base_config.batch, global_=global_batch),
            data=replace(self.base_config.data, sequence=sequence),
        )
        return replace(self, global_batch=global_batch, sequence=sequence, base_config=base_config)
