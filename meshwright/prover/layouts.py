"""Settings of a proof run on a smaller layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from meshwright.config import FSDPConfig, PipelineConfig, RunConfig
from meshwright.prover.claims import describe_settings
from meshwright.topology.layout import Layout
from meshwright.topology.schedules import SCHEDULES

__all__ = ["accumulation_steps", "describe_settings", "fit_reshard_degree", "limit_stages"]
ACCUMULATION = 3


def limit_stages(config: RunConfig) -> PipelineConfig:
    """The pipeline with at most the schedule's default number of stages per rank."""
    default = SCHEDULES[config.pipeline.schedule].default_stages
    return replace(config.pipeline, stages=min(config.pipeline.stages or default, default))


def accumulation_steps(config: RunConfig, layout: Layout) -> int:
    """The smallest number of micro-batches above one that the pipeline schedule supports. DDP with static_graph cannot
    skip the synchronization of its first backward, so such a config does not accumulate.
    """
    if layout.pipeline == 1:
        return 1 if config.ddp.static_graph else ACCUMULATION
    schedule, ranks = config.pipeline.schedule, layout.pipeline
    minimum = max(ACCUMULATION, SCHEDULES[schedule].min_micro_batches(ranks))
    return next(m for m in count(minimum) if m % max(1, m // ranks) == 0)


def fit_reshard_degree(fsdp: FSDPConfig, shard_group_size: int) -> FSDPConfig:
    """`fsdp.reshard_after_forward` for a smaller shard group: unchanged if it divides the group, else half of it."""
    if shard_group_size % (fsdp.ranks_after_forward or 1) == 0:
        return fsdp
    return replace(fsdp, reshard_after_forward=shard_group_size // 2 if shard_group_size > 3 else False)
