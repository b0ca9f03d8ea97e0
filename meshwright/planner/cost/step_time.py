"""Step time by phase: computation, recomputation, exposed communication, pipeline bubble and optimizer update.

Every rank computes its layers for every micro-batch. The slowest rank of a pipeline sets the pace, and the first and
last passes of the other ranks are the bubble. Communication that is not overlapped with computation is exposed;
overlapped communication costs what it takes longer than the computation, and slows the computation down a little
(contention).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, singledispatch
from typing import Any

from meshwright.models.architecture import Architecture
from meshwright.planner.cost.collective_time import (
    CollectiveTime,
    collective_time,
    context_collectives,
    expert_collectives,
    tensor_collectives,
)
from meshwright.planner.cost.estimate import CollectiveCost, Estimate, MemoryEstimate
from meshwright.planner.cost.in_flight import representative_micro_batches
from meshwright.planner.cost.layer_time import (
    LayerShape,
    embedding_time,
    head_time,
    layer_shape,
    layer_time,
    optimizer_time,
)
from meshwright.planner.cost.rank_parameters import (
    LayerCounts,
    ParameterGroup,
    group_placements,
    layer_counts_by_rank,
    layer_counts_by_stage,
    rank_parameters,
)
from meshwright.planner.cost.uncertainty import interval
from meshwright.planner.hardware.links import GroupPlacement
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.topology import schedule_orders, schedule_timeline
from meshwright.topology.schedules import find_schedule

MAX_ACTIONS = 1 << 13
"""The largest schedule (micro-batches times stages) that is executed action by action."""
NEARLY_FULL = 0.92
"""The fraction of a device's memory above which the caching allocator may have to retry."""


@dataclass
class StepTime:
    """Seconds of the slowest rank by phase, and the collectives that they include."""

    phases: dict[str, float] = field(default_factory=dict)
    calls: list[CollectiveCost] = field(default_factory=list)

    def add(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds

    def add_collective(self, time: CollectiveTime) -> None:
        self.add(time.axis.split("+")[0], time.exposed)
        placement = time.placement
        self.calls.append(
            CollectiveCost(
                time.axis,
                time.collective,
                time.message_bytes,
                time.calls,
                placement.ranks,
                placement.link,
                time.seconds,
                time.exposed,
            )
        )


@dataclass(frozen=True)
class MicroBatchTime:
    """Seconds of one micro-batch in all layers of one pipeline rank or stage."""

    forward: float
    backward: float
    recompute: float
    forward_collectives: list[CollectiveTime]
    backward_collectives: list[CollectiveTime]
    weight_gradient: float

    @cached_property
    def seconds(self) -> float:
        exposed = sum(time.exposed for time in (*self.forward_collectives, *self.backward_collectives))
        return self.forward + self.backward + self.recompute + exposed


def micro_batch_time(job: PlannedJob, shape: LayerShape, counts: LayerCounts) -> MicroBatchTime:
    dense_layers, moe_layers, has_embedding, has_head = counts
    forward = backward = recompute = weight_gradient = 0.0
    forward_collectives: list[CollectiveTime] = []
    backward_collectives: list[CollectiveTime] = []
    recomputes_collectives = job.activation_checkpoint == "full" or (
        job.activation_checkpoint == "selective" and job.trainer.torch_native
    )
    for count, moe in ((dense_layers, False), (moe_layers, True)):
        if not count:
            continue
        layer = layer_time(shape, moe)
        forward += count * layer.forward
        backward += count * layer.backward
        recompute += count * layer.recompute
        weight_gradient += count * layer.weight_gradient
        tensor, tensor_backward = tensor_collectives(job, shape, moe)
        context, context_backward = context_collectives(job, shape, layer.attention)
        expert = expert_collectives(job, shape) if moe else []
        recomputed = [*context, *expert] if recomputes_collectives else []
        forward_collectives += [time.times(count) for time in (*tensor, *context, *expert)]
        backward_collectives += [
            time.times(count) for time in (*tensor_backward, *context_backward, *expert, *recomputed)
        ]
    for is_there, end in ((has_embedding, embedding_time(shape)), (has_head, head_time(shape))):
        if is_there:
            forward, backward = forward + end.forward, backward + end.backward
            weight_gradient = weight_gradient + end.weight_gradient
    return MicroBatchTime(forward, backward, recompute, forward_collectives, backward_collectives, weight_gradient)


def bubble(job: PlannedJob, ranks: list[MicroBatchTime]) -> float:
    """Seconds that the slowest rank waits for the first and last passes of the other ranks, in closed form."""
    if len(ranks) == 1:
        return 0.0
    others = sum(rank.seconds for rank in ranks) - max(rank.seconds for rank in ranks)
    return others * (1 / find_schedule(job.schedule).bubble_divisor(job.stages_per_rank))


def executed_bubble(job: PlannedJob, shape: LayerShape, ranks: list[MicroBatchTime]) -> float:
    """The bubble of the schedule when it is executed action by action, with the seconds of each stage. Further rounds
    of a full pipeline add no bubble, so a few rounds stand for all. Falls back to the closed form for large schedules.
    """
    stage_count = job.layout.pipeline * job.stages_per_rank
    micro_batches = representative_micro_batches(job.layout.pipeline, job.batch.accumulation)
    if len(ranks) == 1 or stage_count * micro_batches > MAX_ACTIONS:
        return bubble(job, ranks)
    stages = [
        micro_batch_time(job, shape, (dense_layers, moe_layers, stage == 0, stage == stage_count - 1))
        for stage, (dense_layers, moe_layers) in enumerate(layer_counts_by_stage(job))
    ]
    seconds = [
        {
            "F": stage.forward + sum(time.exposed for time in stage.forward_collectives),
            "B": stage.backward + stage.recompute + sum(time.exposed for time in stage.backward_collectives),
            "W": stage.weight_gradient,
        }
        for stage in stages
    ]
    for durations in seconds:
        durations["I"] = durations["B"] - durations["W"]
    orders = schedule_orders.action_orders(job.schedule, job.layout.pipeline, micro_batches, job.stages_per_rank)
    rows = schedule_timeline.execute_orders(orders, stage_count, lambda action: seconds[action.stage][action.op])
    busy = max(sum(slot.end - slot.start for slot in row) for row in rows)
    return float(max(row[-1].end for row in rows) - busy)


def estimate_step(
    job: PlannedJob,
    memory_by_rank: list[MemoryEstimate],
    has_assumptions: bool = False,
    simulate_pipeline: bool = False,
) -> Estimate:
    """`has_assumptions` widens the interval; `simulate_pipeline` executes the schedule instead of the closed form."""
    shape, step = layer_shape(job), StepTime()
    counts_by_rank = layer_counts_by_rank(job)
    times = {counts: micro_batch_time(job, shape, counts) for counts in set(counts_by_rank)}  # most ranks are alike
    ranks = [times[counts] for counts in counts_by_rank]
    slowest = max(times, key=lambda counts: times[counts].seconds)
    slow = times[slowest]
    micro_steps = job.batch.accumulation
    step.add("forward", micro_steps * slow.forward)
    step.add("backward", micro_steps * slow.backward)
    step.add("recompute", micro_steps * slow.recompute)
    for time in (*slow.forward_collectives, *slow.backward_collectives):
        step.add_collective(time.times(micro_steps))
    step.add("bubble", executed_bubble(job, shape, ranks) if simulate_pipeline else bubble(job, ranks))
    add_pipeline_sends(job, shape, step, len(ranks))
    add_data_parallel(job, step, slow, slowest)
    step.add("update", optimizer_time(job, max(rank_parameters(job, counts).updated for counts in times)))
    step.add("other", job.trainer.fixed_step_seconds)
    flops = step_flops(job.model, job)
    phases = {phase: seconds for phase, seconds in step.phases.items() if seconds > 0}
    nearly_full = any(memory.total > NEARLY_FULL * job.cluster.device.memory for memory in memory_by_rank)
    low, high, source = interval(job, phases, nearly_full, has_assumptions)
    return Estimate(
        job, memory_by_rank, phases, step.calls, low, high, source, flops.model, flops.model + flops.recomputed
    )


def add_pipeline_sends(job: PlannedJob, shape: LayerShape, step: StepTime, ranks: int) -> None:
    """Every stage of a rank sends activations forward and gradients backward, once per micro-batch. The bubble contains
    the sends of the first and the last pass.
    """
    if ranks == 1:
        return
    placement, trainer = group_placements(job)["pipeline"], job.trainer
    divided = job.layout.tensor if trainer.sequence_parallel or trainer.scatters_stage_outputs else 1
    message_bytes = trainer.stage_output_bytes * shape.tokens * job.model.width / divided
    send = collective_time(job, "pipeline", "send", message_bytes, 1, placement)
    sends = send.times(2 * job.batch.accumulation * job.stages_per_rank)
    step.add_collective(replace(sends, exposed=sends.seconds * (1 - trainer.pipeline_overlap)))
    step.add("bubble", 2 * (ranks - 1) * send.seconds)


def add_data_parallel(job: PlannedJob, step: StepTime, slow: MicroBatchTime, counts: LayerCounts) -> None:
    """Adds the reductions of gradients and the all-gathers of parameters."""
    trainer, single_stage = job.trainer, job.layout.pipeline == 1
    for group in rank_parameters(job, counts).groups:
        shards, replicas = group.shards, group.replicas
        if shards.ranks > 1 and reshards_units(job):
            add_fsdp_units(job, step, group, slow, max(1, counts[0] + counts[1]))
        elif shards.ranks > 1:
            collective = "all_reduce" if trainer.all_reduces_gradients else "reduce_scatter"
            calls = job.batch.accumulation if job.sharding == "gradients" and single_stage else 1
            add_overlapped(
                job, step, group.axis, collective, group.numel * reduce_bytes(job), shards, slow.backward, calls
            )
            add_overlapped(job, step, group.axis, "all_gather", group.numel * gather_bytes(job), shards, slow.forward)
        if group.is_expert and job.layout.tensor > 1 and not trainer.experts_over_tensor_axis:
            # Each tensor-parallel rank routes different tokens, so its expert gradients are partial sums.
            calls = job.batch.accumulation if reshards_units(job) and single_stage else 1
            message_bytes, placement = group.numel * reduce_bytes(job), group_placements(job)["tensor"]
            add_overlapped(job, step, "tensor", "all_reduce", message_bytes, placement, slow.backward, calls)
        if replicas.ranks > 1:
            message_bytes = group.numel / shards.ranks * reduce_bytes(job)
            add_overlapped(job, step, "replicate", "all_reduce", message_bytes, replicas, slow.backward)


def reshards_units(job: PlannedJob) -> bool:
    """Whether parameters are unsharded unit by unit in every micro-step."""
    return job.sharding == "parameters" and not (job.trainer.keeps_stages_unsharded and job.layout.pipeline > 1)


def add_overlapped(
    job: PlannedJob,
    step: StepTime,
    axis: str,
    collective: str,
    message_bytes: float,
    placement: GroupPlacement,
    compute: float,
    calls: int = 1,
) -> None:
    """Adds collectives, each of which overlaps with `compute` seconds of computation if the trainer overlaps them."""
    time = collective_time(job, axis, collective, message_bytes, 1, placement)
    if not job.trainer.unoverlapped_data_comm:
        time = time.overlapped_with(job.trainer.data_overlap * compute)
        step.add("contention", calls * job.trainer.contention * (time.seconds - time.exposed))
    step.add_collective(time.times(calls))


def reduce_bytes(job: PlannedJob) -> float:
    """Bytes per element of a gradient reduction. Trainers that reduce fp16 gradients in fp16 reduce bf16 in float32."""
    if job.trainer.compresses_gradients:
        return 2.0
    return 4.0 if job.trainer.reduce_bytes == 2 and job.precision == "bf16" else job.trainer.reduce_bytes


def gather_bytes(job: PlannedJob) -> float:
    """Bytes per element of an all-gather of parameters: the compute dtype, or float32 if that is the compute dtype."""
    return max(job.trainer.gather_bytes, 4.0 if job.precision in ("fp32", "fp64") else 0.0)


def add_fsdp_units(job: PlannedJob, step: StepTime, group: ParameterGroup, slow: MicroBatchTime, units: int) -> None:
    """FSDP all-gathers each unit while the previous one computes, in forward and again in backward, where the gradients
    of the previous unit are reduce-scattered at the same time. The first and the last unit are exposed.
    """
    trainer, micro_steps = job.trainer, job.batch.accumulation
    one_adapter = trainer.single_adapter_gathers and group.shards.nodes > 1
    placement = GroupPlacement(group.shards.ranks, 1) if one_adapter else group.shards
    unit = group.numel / units
    gather = collective_time(job, group.axis, "all_gather", unit * gather_bytes(job), 1, placement)
    scatter = collective_time(job, group.axis, "reduce_scatter", unit * trainer.reduce_bytes, 1, placement)
    forward, backward = slow.forward / units, (slow.backward + slow.recompute) / units
    exposed = units * max(0.0, gather.seconds - forward) + gather.seconds
    if job.layout.pipeline > 1:  # the schedule reshards after each forward pass, and accumulates gradients locally
        step.add_collective(replace(gather.times(units * (micro_steps + 1)), exposed=(micro_steps + 1) * exposed))
        step.add_collective(scatter.times(units).overlapped_with(slow.backward))
        step.add("contention", micro_steps * units * trainer.contention * min(gather.seconds, forward))
        return
    stays_unsharded = job.run_config is not None and job.run_config.fsdp.ranks_after_forward == 1
    regather = 0.0 if stays_unsharded else gather.seconds
    exposed_backward = units * max(0.0, regather + scatter.seconds - backward) + scatter.seconds
    all_gathers = (2 if regather else 1) * units * micro_steps
    step.add_collective(replace(gather.times(all_gathers), exposed=micro_steps * exposed))
    step.add_collective(replace(scatter.times(units * micro_steps), exposed=micro_steps * exposed_backward))
    overlapped = min(gather.seconds, forward) + min(regather + scatter.seconds, backward)
    step.add("contention", micro_steps * units * trainer.contention * overlapped)


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step over all devices."""

    model: float
    """forward and backward"""
    recomputed: float
    """what activation checkpointing repeats"""


@singledispatch
def step_flops(model: Any, job: PlannedJob) -> StepFlops:
    raise NotImplementedError(type(model))


@step_flops.register
def _(model: Architecture, job: PlannedJob) -> StepFlops:
    """Matrix products, and causal attention."""
    tokens = job.tokens_per_step
    layers = ((0, model.layers - model.moe_layers), (model.layers - 1, model.moe_layers))  # a dense and a MoE layer
    active = sum(model.active_matrix_parameters(layer) * count for layer, count in layers)
    matmul_flops = 6.0 * tokens * (active + model.vocab * model.width)
    attention_flops = 3.0 * tokens * job.sequence * model.attention_width * model.layers
    recomputed = 0.0
    if job.activation_checkpoint in ("full", "alternate"):
        fraction = 0.5 if job.activation_checkpoint == "alternate" else 1.0
        head_flops = 6.0 * tokens * model.vocab * model.width
        recomputed = fraction * (matmul_flops - head_flops + attention_flops) / 3
    elif job.activation_checkpoint == "selective" and not job.trainer.flash_attention:
        recomputed = attention_flops / 3
    return StepFlops(matmul_flops + attention_flops, recomputed)
