"""The collectives of a Meshwright step outside of its passes: step control, broadcasts, tied weights, the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.base.config import RunConfig
from meshwright.base.dtypes import parameter_bytes, weight_bytes
from meshwright.base.hardware.links import GroupPlacement, collective_seconds
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.parameter_shards import parameter_shards, uses_ddp
from meshwright.planner.cost.trace.data_parallel_plan import gradient_bytes
from meshwright.planner.cost.trace.operations import Communicate
from meshwright.planner.cost.trace.optimizer_messages import optimizer_messages
from meshwright.planner.cost.units.group_placements import group_placements
from meshwright.planner.cost.units.rank_units import unit_groups
from meshwright.planner.workload.planned_job import PlannedJob

if TYPE_CHECKING:
    from meshwright.planner.cost.trace.cost_trace import CostTrace

CONTROL_VECTOR_BYTES = 8 * 9
"""The step control vector: tokens, bad samples, their ranks, two signals, three save flags, a stop."""
USED_PARAMETERS_BYTES = 2 * 8
"""What it has for every pipeline rank: two flags on parameters that were used."""


def begin_messages(trace: CostTrace) -> Iterator[Communicate]:
    """The control vector overlaps with the first forward pass. Buffers of a user's model are broadcast once per step by
    DDP, and in every micro-step with FSDP2, axis by axis.
    """
    job, config = trace.job, trace.config
    if config is None or job.layout.ranks == 1:
        return
    everyone = GroupPlacement(job.layout.ranks, min(job.layout.ranks, job.cluster.devices_per_node))
    yield overlapped(job, "control", "all_reduce", control_bytes(config, job), everyone)
    if isinstance(job.model, TracedModel) and job.model.buffer_bytes:
        group = unit_groups(job)[0]
        calls = 1 if uses_ddp(job.layout) else job.batch.accumulation
        for axis, placement in ((group.replicate_axis, group.replicas), (group.shard_axis, group.shards)):
            if placement.ranks > 1:
                yield overlapped(job, axis, "broadcast", job.model.buffer_bytes * calls, placement)


def overlapped(
    job: PlannedJob, axis: str, collective: str, message_bytes: float, placement: GroupPlacement
) -> Communicate:
    seconds = collective_seconds(job.cluster, collective, message_bytes, placement)
    return Communicate(axis, collective, message_bytes, 1, placement, seconds, seconds)


def control_bytes(config: RunConfig, job: PlannedJob) -> int:
    """The step control vector, the loss, the gradient norm if ranks have different parameters, and the expert loads."""
    layout, traced = job.layout, job.model if isinstance(job.model, TracedModel) else None
    norm = 8 if set(layout.active_axes) - {"replicate", "context"} else 0
    experts = config.model.experts if traced is None else 0
    loads = 8 * config.model.layers * (experts + 1) if experts else 0
    vector = CONTROL_VECTOR_BYTES + USED_PARAMETERS_BYTES * layout.pipeline
    # The sums and counts of what a policy objective or a user's loss measures travel with the loss, all in float64.
    measured = traced.measured if traced is not None else len(config.rl.measured_names)
    in_float64 = measured > 0 if traced is not None else config.rl.enabled
    loss = 8 * (1 + 2 * measured) if in_float64 else parameter_bytes(config)
    return vector + loss + norm + loads


def end_messages(trace: CostTrace) -> Iterator[Communicate]:
    """With tied weights in a pipeline, the gradient of the head goes to the first stage, and the updated weight comes
    back. Optimizers that need whole matrices exchange them; the time of that is part of the update.
    """
    job, config, spec = trace.job, trace.config, trace.spec
    if config is None or spec is None:
        return
    shards = parameter_shards(spec, config, job.layout, trace.rank)
    first, last = (any(getattr(stage.layers, end) for stage in trace.stages) for end in ("is_first", "is_last"))
    if job.layout.pipeline > 1 and first != last:
        tied = sum(shard.shard_numel for shard in shards if shard.is_tied and shard.trainable)
        if tied:
            sent_bytes = weight_bytes(config) if first else gradient_bytes(config, job.layout, job.batch)
            yield overlapped(job, "pipeline", "send", tied * sent_bytes, group_placements(job)["pipeline"])
    messages: Counter[tuple[str, str]] = optimizer_messages(config, job.layout, spec, shards, trace.rank)
    ranks = job.layout.ranks // job.layout.pipeline
    for (axis, collective), message in messages.items():
        placement = GroupPlacement(ranks, min(ranks, job.cluster.devices_per_node))
        yield overlapped(job, axis, collective, message, placement)
