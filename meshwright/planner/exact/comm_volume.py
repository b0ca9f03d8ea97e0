"""What one rank sends in one optimizer step, by axis and collective: exact, and held against counted bytes by `prove`.

Messages are whole tensors; wire bytes follow by the ring count. P is what a rank holds of the parameters once they are
gathered, filled up where rows do not divide; M micro-steps; n ranks on the axis. Ranks with other pieces of the same
sequences count among shards (shard+context), or among copies where nothing is sharded (replicate+context). Banks of
experts that are divided meet over fewer ranks (expert_shard, expert_replicate), by the same rules.

| layout | message bytes |
|---|---|
| replicate (DDP) | all-reduce P |
| shard optimizer | all-gather P, reduce-scatter P |
| shard gradients | all-gather P, reduce-scatter M P |
| shard parameters | all-gather 2 M P, reduce-scatter M P |
| pipeline | reduce-scatter P; all-gather P, of sharded parameters as often as the schedule asks (passes) |
| copies beside shards | all-reduce P / n, over the copies |
| tensor: norms, routers, banks | all-reduce of their gradients, wherever gradients meet |
| activations | see messages |

By the ring count an all-reduce sends twice its message, so DDP and the first two kinds of sharding send 2 P (n - 1) / n
where M = 1, and sharded parameters 3 P (n - 1) / n.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshwright.config import Batch, RunConfig
from meshwright.config.dtypes import COMPUTE_BYTES
from meshwright.planner.exact.activation_messages import Messages, attention, experts, matrices, stages, weight_bytes
from meshwright.planner.exact.unshard_timeline import UnshardTimeline, nests_of, order_of
from meshwright.topology.collectives import wire_bytes
from meshwright.topology.layout import Layout
from meshwright.topology.parameter_shards import (
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

CONTROL_SUM = 9 * 8
"""Tokens, bad samples, their ranks, two signals, two words on saving, two on the parameters that were used."""


@dataclass(frozen=True, order=True)
class CollectiveVolume:
    axis: str
    collective: str
    message_bytes: int
    wire_bytes: int


def comm_volume(config: RunConfig, layout: Layout, batch: Batch, rank: int = 0) -> list[CollectiveVolume]:
    """Of a step on a layout. Ranks differ where they hold different stages of a pipeline; see `experts` for what is
    known of each rank by itself.
    """
    pieces, hold = parameter_shards(config, layout, rank), pipeline_placement(config, layout, rank)
    messages: Messages = Counter()
    if layout.ranks > 1:
        messages["control", "all_reduce"] += control(config, layout)
    if uses_ddp(layout):
        compressed = 2 if config.ddp.comm_hook == "bf16_compress" else weight_bytes(config)
        axis = dense_shard_group(layout, rank).replicate_axis
        messages[axis, "all_reduce"] += sum(piece.numel for piece in pieces) * compressed
    elif uses_fsdp(layout):
        messages += sharded(config, layout, batch, group_by_unit(pieces), rank)
    if layout.tensor > 1:
        messages += matrices(config, layout, batch, hold)
        partial = sum(piece.numel for piece in pieces if piece.grad_is_partial)
        messages["tensor", "all_reduce"] += (
            meetings(config, layout, batch) * partial * partial_bytes(config, layout, batch)
        )
    if layout.context > 1:
        messages += attention(config, layout, batch, hold)
    if config.model.experts:
        messages += experts(config, layout, batch, hold)
    if layout.pipeline > 1:
        messages += stages(config, layout, batch, hold, pieces, rank)
    rows = [
        CollectiveVolume(axis, collective, message, wire_bytes(collective, message, ranks_on(config, layout, axis)))
        for (axis, collective), message in messages.items()
        if message
    ]
    return sorted(rows)


def ranks_on(config: RunConfig, layout: Layout, axis: str) -> int:
    """`control` is all ranks; `other` those that keep a unit together between forward and backward."""
    if axis in ("control", "other"):
        return layout.ranks if axis == "control" else kept(config, dense_shard_group(layout, 0))
    if axis.startswith("expert_"):
        rest = layout.expert_axes_size // layout.expert
        copies, shards = (layout.replicate, rest) if layout.shard > 1 else (rest, 1)
        return copies if axis == "expert_replicate" else shards
    ranks = 1
    for part in axis.split("+"):
        ranks *= getattr(layout, part)
    return ranks


def kept(config: RunConfig, over: ShardGroup) -> int:
    """Ranks that hold a unit together between forward and backward, where fewer do than share it; else 0."""
    keep = config.fsdp.ranks_after_forward
    return keep if config.layout.shard == "parameters" and keep is not None and keep < over.shards else 0


def control(config: RunConfig, layout: Layout) -> int:
    """The sums that ranks agree by: what the step is made of, its loss, the norm where ranks hold different parts of
    the parameters, and every expert's load.
    """
    norm = 8 if set(layout.active_axes) - {"replicate", "context"} else 0
    loads = 8 * config.model.layers * (config.model.experts + 1) if config.model.experts else 0
    return CONTROL_SUM + weight_bytes(config) + norm + loads


def meetings(config: RunConfig, layout: Layout, batch: Batch) -> int:
    """How often in a step gradients meet. A pipeline's schedule adds them up itself."""
    each_time = config.layout.shard in ("gradients", "parameters") and layout.pipeline == 1 and uses_fsdp(layout)
    return batch.accumulation if each_time else 1


def partial_bytes(config: RunConfig, layout: Layout, batch: Batch) -> int:
    """Of a gradient whose parts meet over the tensor axis: FSDP2 has it in the precision of compute until it adds it to
    that of an earlier micro-step.
    """
    alone = batch.accumulation == 1 or config.layout.shard in ("gradients", "parameters")
    fresh = uses_fsdp(layout) and layout.pipeline == 1 and alone
    return COMPUTE_BYTES[config.precision.compute] if fresh else weight_bytes(config)


def gathered_bytes(config: RunConfig, units: Units) -> dict[str, int]:
    """Each unit once it is gathered: in the precision of compute, but for the one with the embedding."""
    each = COMPUTE_BYTES[config.precision.compute]
    first = {unit: members[0].name == "decoder.embedding.weight" for unit, members in units.items()}
    return {
        unit: sum(piece.padded_numel for piece in members) * (weight_bytes(config) if first[unit] else each)
        for unit, members in units.items()
    }


def walked(config: RunConfig, layout: Layout, batch: Batch, units: Units, rank: int) -> UnshardTimeline:
    """The units of a rank's stages through the schedule."""
    whole = gathered_bytes(config, units)
    keep = {unit: kept(config, members[0].shard_group) for unit, members in units.items()}
    of_stage: dict[int, list[str]] = {members[0].stage: [] for members in units.values()}
    for unit, members in units.items():
        of_stage[members[0].stage].append(unit)
    walk = UnshardTimeline(
        {stage: nests_of(names) for stage, names in of_stage.items()},
        whole,
        {unit: size // keep[unit] for unit, size in whole.items() if keep[unit] > 1},
        lets_go=config.layout.shard == "parameters" and config.fsdp.ranks_after_forward != 1,
    )
    return walk.run(order_of(config, layout, batch, rank), not SCHEDULES[config.pipeline.schedule].single_stage)


def gathers(config: RunConfig, layout: Layout, batch: Batch, units: Units, rank: int) -> Counter[tuple[str, str]]:
    """How often each unit is gathered in a step, from shards and from what fewer ranks kept. Recomputation finds it
    gathered: backward needs it, too.
    """
    if layout.pipeline > 1:
        return walked(config, layout, batch, units, rank).gathers
    counts: Counter[tuple[str, str]] = Counter()
    for unit, members in units.items():
        if config.layout.shard != "parameters":
            counts[unit, "shards"] = 1
            continue
        keep = kept(config, members[0].shard_group)
        counts[unit, "shards"] = batch.accumulation * (1 if keep else 2)
        counts[unit, "part"] = batch.accumulation if keep > 1 else 0
    return counts


def sharded(config: RunConfig, layout: Layout, batch: Batch, units: Units, rank: int) -> Messages:
    messages: Messages = Counter()
    summed, whole = weight_bytes(config), gathered_bytes(config, units)
    shared = any(members[0].shard_group.shards > 1 for members in units.values())
    counts = gathers(config, layout, batch, units, rank) if shared else Counter()
    for unit, members in units.items():
        over, padded = members[0].shard_group, sum(piece.padded_numel for piece in members)
        if over.shards > 1:
            messages[over.shard_axis, "all_gather"] += counts[unit, "shards"] * whole[unit]
            messages["other", "all_gather"] += counts[unit, "part"] * whole[unit]
            messages[over.shard_axis, "reduce_scatter"] += meetings(config, layout, batch) * padded * summed
        if over.replicas > 1:
            messages[over.replicate_axis, "all_reduce"] += padded // over.shards * summed
    return messages
