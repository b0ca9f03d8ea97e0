"""What is to be trained, before anything is said of how it is spread; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.config import RunConfig
from meshwright.planner.workload.architecture import Architecture

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
"""Settings that a plan decides, unless a word pins them."""


@dataclass(frozen=True)
class Workload:
    model: Architecture
    global_batch: int
    """samples a step, over all ranks"""
    sequence: int
    precision: str = "bf16"
    base_config: RunConfig | None = None
    """the run whose layout is sought; none where our own decoder does not train this"""
    pinned: Mapping[str, int | str] = field(default_factory=dict)
    """of SEARCHED, what is not to be decided"""
    notes: tuple[str, ...] = ()
    """what was assumed because nobody said it"""

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence

    def with_size(self, batch: int | None = None, sequence: int | None = None) -> Workload:
        """The same with another batch or sequence, its run, too."""
        batch, sequence = batch or self.global_batch, sequence or self.sequence
        base = self.base_config and replace(
            self.base_config,
            batch=replace(self.base_config.batch, global_=batch),
            data=replace(self.base_config.data, sequence=sequence),
        )
        return replace(self, global_batch=batch, sequence=sequence, base_config=base)
