"""Communication volume of one rank in one optimizer step, by axis and collective: exact, and verified by `prove`.

Message bytes are those of full tensors; wire bytes follow from the ring algorithm. P is the bytes of a rank's
parameters once they are unsharded, padded if rows do not divide; M is the number of micro-steps, n the ranks of the
axis. Context-parallel ranks belong to the shard group (shard+context), or to the replicas if nothing is sharded
(replicate+context). Weights of experts that are divided over ranks are reduced over smaller groups (expert_shard,
expert_replicate) by the same rules.

| layout | message bytes |
|---|---|
| replicate (DDP) | all-reduce P |
| shard optimizer | all-gather P, reduce-scatter P |
| shard gradients | all-gather P, reduce-scatter M P |
| shard parameters | all-gather 2 M P, reduce-scatter M P |
| pipeline | reduce-scatter P; all-gather P, and with sharded parameters as often as the schedule unshards |
| replicas of shards | all-reduce P / n over the replicas |
| tensor | all-reduce of the gradients of norms, routers and experts, whenever gradients are reduced |
| activations | see `activation_messages` |
| optimizers that need whole matrices | see `optimizer_messages` |

With the ring algorithm an all-reduce sends twice its message. With M = 1, DDP and sharding of the optimizer or of the
gradients therefore send 2 P (n - 1) / n, and sharding of the parameters 3 P (n - 1) / n.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshwright.config import Batch, RunConfig
from meshwright.config.dtypes import COMPUTE_BYTES, parameter_bytes, weight_bytes
from meshwright.models.registry import run_spec
from meshwright.models.spec import BEFORE, ROOT, ModelSpec
from meshwright.planner.exact.activation_messages import (
    MessageBytes,
    context_parallel_messages,
    expert_parallel_messages,
    pipeline_messages,
    tensor_parallel_messages,
)
from meshwright.planner.exact.optimizer_messages import optimizer_messages
from meshwright.planner.exact.unshard_timeline import UnshardTimeline, nest_units, rank_actions
from meshwright.topology.collectives import wire_bytes
from meshwright.topology.layout import Layout
from meshwright.topology.matrix_owners import OPTIMIZER_AXIS
from meshwright.topology.parameter_shards import (
    ParameterShard,
    ShardGroup,
    Units,
    dense_shard_group,
    group_by_unit,
    parameter_shards,
    pipeline_placement,
    uses_ddp,
    uses_fsdp,
)
from meshwright.topology.schedules import SCHEDULES

CONTROL_VECTOR_BYTES = 8 * 9
"""The step control vector: tokens, bad samples, their ranks, two signals, three save flags, a stop."""
USED_PARAMETERS_BYTES = 2 * 8
"""What it has for every pipeline rank: two flags on parameters that were used."""


@dataclass(frozen=True, order=True)
class CollectiveVolume:
    """The bytes of one collective on one axis in one step."""

    axis: str
    collective: str
    message_bytes: int
    wire_bytes: int


def comm_volume(
    config: RunConfig, layout: Layout, batch: Batch, rank: int = 0, spec: ModelSpec | None = None
) -> list[CollectiveVolume]:
    """The volume of one rank for a model: that of the config, or the one that `spec` describes. Ranks differ by their
    pipeline stages, and by the load of their experts (see `activation_messages`).
    """
    spec = spec or run_spec(config)
    parameters = parameter_shards(spec, config, layout, rank)
    placement = pipeline_placement(config, layout, rank, spec.block_costs(config.data.sequence))
    messages: MessageBytes = Counter()
    if layout.ranks > 1:
        messages["control", "all_reduce"] += control_bytes(config, layout)
    if uses_ddp(layout):
        gradient_bytes = 2 if config.ddp.comm_hook == "bf16_compress" else parameter_bytes(config)
        axis = dense_shard_group(layout, rank).replicate_axis
        messages[axis, "all_reduce"] += sum(p.numel for p in parameters if p.trainable) * gradient_bytes
    elif uses_fsdp(layout):
        messages += fsdp_messages(config, layout, batch, group_by_unit(parameters), rank)
    if layout.tensor > 1:
        messages += tensor_parallel_messages(config, layout, batch, placement, spec)
        partial = sum(parameter.numel for parameter in parameters if parameter.grad_is_partial)
        reductions = reductions_per_step(config, layout, batch)
        messages["tensor", "all_reduce"] += reductions * partial * partial_gradient_bytes(config, layout, batch)
    if layout.context > 1:
        messages += context_parallel_messages(config, layout, batch, placement, spec)
    if config.model.experts:
        messages += expert_parallel_messages(config, layout, batch, placement, spec)
    if layout.pipeline > 1:
        messages += pipeline_messages(config, layout, batch, placement, parameters, rank)
    messages += optimizer_messages(config, layout, spec, parameters, rank)
    rows = [
        CollectiveVolume(axis, collective, message, wire_bytes(collective, message, group_size(config, layout, axis)))
        for (axis, collective), message in messages.items()
        if message
    ]
    return sorted(rows)


def group_size(config: RunConfig, layout: Layout, axis: str) -> int:
    """`control` is the group of all ranks; `other` is the group that shards a unit between forward and backward;
    `optimizer` is the group of the ranks that update the same parameters.
    """
    if axis == OPTIMIZER_AXIS:
        return layout.ranks // layout.pipeline
    if axis in ("control", "other"):
        return layout.ranks if axis == "control" else ranks_after_forward(config, dense_shard_group(layout, 0))
    if axis.startswith("expert_"):
        remaining = layout.expert_axes_size // layout.expert
        replicas, shards = (layout.replicate, remaining) if layout.shard > 1 else (remaining, 1)
        return replicas if axis == "expert_replicate" else shards
    ranks = 1
    for name in axis.split("+"):
        ranks *= getattr(layout, name)
    return ranks


def ranks_after_forward(config: RunConfig, shard_group: ShardGroup) -> int:
    """The ranks that a unit stays sharded over between forward and backward, if they are fewer than its shard group;
    otherwise 0 (FSDP2's `reshard_after_forward`).
    """
    ranks = config.fsdp.ranks_after_forward
    return ranks if config.layout.shard == "parameters" and ranks is not None and ranks < shard_group.shards else 0


def control_bytes(config: RunConfig, layout: Layout) -> int:
    """The step control vector, the loss, the gradient norm if ranks have different parameters, and the expert loads."""
    norm = 8 if set(layout.active_axes) - {"replicate", "context"} else 0
    loads = 8 * config.model.layers * (config.model.experts + 1) if config.model.experts else 0
    vector = CONTROL_VECTOR_BYTES + USED_PARAMETERS_BYTES * layout.pipeline
    # The sums and counts of what a policy objective measures travel with the loss, all in float64.
    loss = 8 * (1 + 2 * len(config.rl.measured_names)) if config.rl.enabled else parameter_bytes(config)
    return vector + loss + norm + loads


def reductions_per_step(config: RunConfig, layout: Layout, batch: Batch) -> int:
    """How often gradients are reduced per step. A pipeline schedule accumulates them locally first."""
    every_micro_step = config.layout.shard in ("gradients", "parameters") and layout.pipeline == 1 and uses_fsdp(layout)
    return batch.accumulation if every_micro_step else 1


def partial_gradient_bytes(config: RunConfig, layout: Layout, batch: Batch) -> int:
    """Bytes per element of a gradient that is reduced over the tensor axis: FSDP2 keeps it in the compute dtype until
    it accumulates it into the gradient of an earlier micro-step.
    """
    not_accumulated = batch.accumulation == 1 or config.layout.shard in ("gradients", "parameters")
    in_compute_dtype = uses_fsdp(layout) and layout.pipeline == 1 and not_accumulated
    return COMPUTE_BYTES[config.precision.compute] if in_compute_dtype else parameter_bytes(config)


def unsharded_bytes(config: RunConfig, units: Units) -> dict[str, int]:
    """Bytes of each unsharded unit: in the compute dtype, except for the units of the modules before the blocks, which
    have that of their weights.
    """
    compute = COMPUTE_BYTES[config.precision.compute]

    def element_bytes(unit: str, parameter: ParameterShard) -> int:
        if unit not in (BEFORE, ROOT):
            return compute
        return weight_bytes(config) if parameter.trainable else parameter_bytes(config)

    return {
        unit: sum(parameter.padded_numel * element_bytes(unit, parameter) for parameter in members)
        for unit, members in units.items()
    }


def run_unshard_timeline(config: RunConfig, layout: Layout, batch: Batch, units: Units, rank: int) -> UnshardTimeline:
    """Runs the pipeline schedule of a rank, and follows the FSDP units of its stages."""
    sizes = unsharded_bytes(config, units)
    ranks = {unit: ranks_after_forward(config, members[0].shard_group) for unit, members in units.items()}
    stages: dict[int, list[str]] = {members[0].stage: [] for members in units.values()}
    for unit, members in units.items():
        stages[members[0].stage].append(unit)
    timeline = UnshardTimeline(
        {stage: nest_units(names) for stage, names in stages.items()},
        sizes,
        {unit: size // ranks[unit] for unit, size in sizes.items() if ranks[unit] > 1},
        reshard_after_forward=config.layout.shard == "parameters" and config.fsdp.ranks_after_forward != 1,
    )
    return timeline.run(rank_actions(config, layout, batch, rank), not SCHEDULES[config.pipeline.schedule].single_stage)


def all_gather_counts(
    config: RunConfig, layout: Layout, batch: Batch, units: Units, rank: int
) -> Counter[tuple[str, str]]:
    """How often each unit is all-gathered per step, from all its shards and from fewer ranks after forward. Activation
    checkpointing adds none: its recomputation runs while the unit is unsharded for backward.
    """
    if layout.pipeline > 1:
        return run_unshard_timeline(config, layout, batch, units, rank).all_gathers
    counts: Counter[tuple[str, str]] = Counter()
    for unit, members in units.items():
        if config.layout.shard != "parameters":
            counts[unit, "sharded"] = 1
            continue
        ranks = ranks_after_forward(config, members[0].shard_group)
        counts[unit, "sharded"] = batch.accumulation * (1 if ranks else 2)
        counts[unit, "resharded"] = batch.accumulation if ranks > 1 else 0
    return counts


def fsdp_messages(config: RunConfig, layout: Layout, batch: Batch, units: Units, rank: int) -> MessageBytes:
    messages: MessageBytes = Counter()
    gradient_bytes, sizes = parameter_bytes(config), unsharded_bytes(config, units)
    is_sharded = any(members[0].shard_group.shards > 1 for members in units.values())
    counts = all_gather_counts(config, layout, batch, units, rank) if is_sharded else Counter()
    for unit, members in units.items():
        group, padded = members[0].shard_group, sum(p.padded_numel for p in members if p.trainable)
        if group.shards > 1:
            messages[group.shard_axis, "all_gather"] += counts[unit, "sharded"] * sizes[unit]
            messages["other", "all_gather"] += counts[unit, "resharded"] * sizes[unit]
            reductions = reductions_per_step(config, layout, batch)
            messages[group.shard_axis, "reduce_scatter"] += reductions * padded * gradient_bytes
        if group.replicas > 1:
            messages[group.replicate_axis, "all_reduce"] += padded // group.shards * gradient_bytes
    return messages
