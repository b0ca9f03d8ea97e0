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
    batch: int
    """samples a step, over all ranks"""
    sequence: int
    precision: str = "bf16"
    base: RunConfig | None = None
    """the run whose layout is sought; none where our own decoder does not train this"""
    pinned: Mapping[str, int | str] = field(default_factory=dict)
    """of SEARCHED, what is not to be decided"""
    notes: tuple[str, ...] = ()
    """what was assumed because nobody said it"""

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def of(self, batch: int | None = None, sequence: int | None = None) -> Workload:
        """The same with another batch or sequence, its run, too."""
        batch, sequence = batch or self.batch, sequence or self.sequence
        base = self.base and replace(
            self.base,
            batch=replace(self.base.batch, global_=batch),
            data=replace(self.base.data, sequence=sequence),
        )
        return replace(self, batch=batch, sequence=sequence, base=base)
