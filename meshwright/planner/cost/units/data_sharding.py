"""How the parameters of a job are divided over the data-parallel ranks of a pipeline stage; torch-free.

| parameters | shard group | replicas |
|---|---|---|
| dense | shard x context | replicate |
| dense, nothing sharded | one rank | replicate x context |
| experts | the ranks with the same experts among those of a dense shard group | the others with the same experts |

The tensor axis is the innermost one: neighbours of a dense group are `tensor` ranks apart. Experts are on neighbours of
a dense group; with `experts_over_tensor_axis` they are on consecutive ranks, those of the tensor axis included, and the
ranks with the same experts are `expert` ranks apart (Megatron-Core with an expert tensor degree of 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshwright.base.topology.layout import Layout
from meshwright.base.topology.parameter_shards import uses_ddp, uses_fsdp
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile


@dataclass(frozen=True)
class ShardRanks:
    """The ranks over which parameters are sharded and replicated."""

    shards: int
    """ranks of a shard group"""
    replicas: int
    """ranks with the same shard"""
    stride: int
    """difference in rank between neighbours of a shard group; replicas are `stride` times `shards` apart"""
    names: tuple[str, str]
    """the axes of a shard group, and of the replicas"""


@dataclass(frozen=True)
class DataSharding:
    """How the parameters of a job are wrapped for data parallelism."""

    fsdp: bool
    """whether FSDP2 shards the parameters, or replicates them in a hybrid layout"""
    ddp: bool
    """whether DDP replicates them"""
    dense: ShardRanks
    experts: ShardRanks
    """the same ranks if experts are parameters like others"""
    expert_stride: int
    """difference in rank between neighbours that have different experts"""

    @property
    def experts_apart(self) -> bool:
        """Whether experts are on other ranks than dense parameters."""
        return self.experts != self.dense


def data_sharding(job: PlannedJob) -> DataSharding:
    return layout_sharding(job.layout, job.sharding, job.trainer)


def layout_sharding(layout: Layout, sharding: str, trainer: TrainerProfile) -> DataSharding:
    over_context = trainer.shards_over_context and sharding != "none" and layout.context > 1
    return _data_sharding(layout, over_context, trainer.experts_over_tensor_axis)


@cache
def _data_sharding(layout: Layout, over_context: bool, over_tensor: bool) -> DataSharding:
    data, tensor = layout.replicate * layout.shard * layout.context, layout.tensor
    suffix = "+context" if layout.context > 1 else ""
    if layout.shard > 1 or over_context:
        shards, names = layout.shard * layout.context, (f"shard{suffix}", "replicate")
    else:
        shards, names = 1, ("shard", f"replicate{suffix}")
    dense = ShardRanks(shards, data // shards, tensor, names)
    fsdp, ddp = uses_fsdp(layout) or over_context, uses_ddp(layout) and not over_context
    over_tensor = over_tensor or layout.expert > layout.expert_axes_size
    if layout.expert == 1 and (tensor == 1 or not over_tensor):
        return DataSharding(fsdp, ddp, dense, dense, tensor)
    inside, stride = (tensor, 1) if over_tensor else (1, tensor)
    same_experts = max(1, data * inside // layout.expert)
    expert_shards = max(1, shards * inside // layout.expert) if shards > 1 else 1
    experts = ShardRanks(
        expert_shards,
        max(1, same_experts // expert_shards),
        stride * layout.expert,
        ("expert_shard", "expert_replicate"),
    )
    return DataSharding(fsdp, ddp, dense, experts, stride)
