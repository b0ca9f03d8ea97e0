"""How long a step takes, by what the time is spent on.

Every rank computes its layers for every micro-batch; the slowest rank of a pipeline sets the pace, and the others'
first and last passes are added once. Messages that nothing hides are added where they are waited for; messages that
computing hides cost what is left of them, and a little of the computing's speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from meshwright.planner.cost.estimate import CollectiveCost, Estimate, MemoryEstimate
from meshwright.planner.cost.in_flight import representative_micro_batches
from meshwright.planner.cost.layer_time import (
    LayerShape,
    embedding_time,
    head_time,
    layer_shape,
    layer_time,
    optimizer_time,
    routed_rows,
)
from meshwright.planner.cost.rank_parameters import (
    Counts,
    ParameterGroup,
    counts_of,
    places_of,
    rank_parameters,
    stage_counts,
)
from meshwright.planner.cost.uncertainty import interval
from meshwright.planner.hardware.links import GroupPlacement, collective_seconds
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.topology import schedule_orders, schedule_timeline
from meshwright.topology.schedules import find_schedule

MOST_PASSES = 1 << 13
"""Of a schedule that is run pass by pass: micro-batches times stages."""
CRAMPED = 0.92
"""Share of a device's memory from which on its allocator may have to wait."""


@dataclass
class StepTime:
    """Seconds of the slowest rank of a step by what they are spent on, and the collectives behind them."""

    phases: dict[str, float] = field(default_factory=dict)
    calls: list[CollectiveCost] = field(default_factory=list)

    def spend(self, phase: str, seconds: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds


@dataclass(frozen=True)
class CollectiveTime:
    """A collective of one layer or one stage, for one micro-batch."""

    axis: str
    kind: str
    size: float
    count: float
    place: GroupPlacement
    seconds: float
    """of all `count`"""
    exposed: float


def message(
    job: PlannedJob, axis: str, kind: str, size: float, count: float, place: GroupPlacement, hidden: float = 0.0
) -> CollectiveTime:
    """`hidden`: the share of it behind which something is computed."""
    seconds = count * collective_seconds(job.cluster, kind, size, place)
    return CollectiveTime(axis, kind, size, count, place, seconds, seconds * (1 - hidden))


def tensor_messages(
    job: PlannedJob, of: LayerShape, experts: bool
) -> tuple[list[CollectiveTime], list[CollectiveTime]]:
    """Of one layer, forward and backward. Of experts only those that every token visits are cut; what is recomputed is
    gathered again, and scattered again where that is not the end of what is needed.
    """
    if job.layout.tensor == 1:
        return [], []
    place, stack = places_of(job)["tensor"], job.trainer
    size = of.tokens * job.model.width * of.plain.size
    parts = 1 if experts and not job.model.experts_shared else 2
    full = job.activation_checkpoint == "full"

    def sent(kind: str, count: float) -> CollectiveTime:
        return message(job, "tensor", kind, size, count, place, stack.tensor_overlap)

    if not stack.sequence_parallel:
        return [sent("all_reduce", parts)], [sent("all_reduce", parts * (2 if full else 1))]
    gathers = parts * (2 if full or (job.activation_checkpoint == "selective" and stack.torch_native) else 1)
    gathers += parts if stack.regathers_in_backward else 0
    scatters = parts + (parts - (1 if stack.torch_native else 0) if full else 0)
    ahead = [sent("all_gather", parts), sent("reduce_scatter", parts)]
    return ahead, [sent("all_gather", gathers), sent("reduce_scatter", scatters)]


def context_messages(job: PlannedJob, of: LayerShape, look: float) -> tuple[list[CollectiveTime], list[CollectiveTime]]:
    ranks = job.layout.context
    if ranks == 1:
        return [], []
    place, model = places_of(job)["context"], job.model
    number = of.plain.size
    keys = number * of.tokens * model.kv_heads * model.head_dim * 2 / job.layout.tensor
    if model.latent_attention is not None:
        keys = number * of.tokens * (model.latent_attention.kv_lora_rank + model.latent_attention.qk_rope_head_dim)
    if job.context_method == "all-to-all":
        size = keys + number * of.tokens * model.heads * model.head_dim * 2 / job.layout.tensor
        there = [message(job, "context", "all_to_all", size / 2, 2, place)]
        return there, there
    if job.context_method == "gather":
        there = [message(job, "context", "all_gather", keys * ranks, 1, place)]
        return there, [*there, message(job, "context", "reduce_scatter", keys * ranks, 1, place)]
    near = GroupPlacement(2, min(2, place.ranks_per_node)) if place.nodes == 1 else GroupPlacement(2, 1)
    ahead = message(job, "context", "send", keys, ranks - 1, near)
    behind = message(
        job, "context", "send", keys, (1 + max(1.0, job.trainer.reduce_bytes / number)) * (ranks - 1), near
    )
    return [kept(ahead, look)], [kept(behind, 2.5 * look)]


def kept(sent: CollectiveTime, computing: float) -> CollectiveTime:
    """What is left of it behind so much computing."""
    return replace(sent, exposed=max(0.0, sent.seconds - computing))


def expert_messages(job: PlannedJob, of: LayerShape) -> list[CollectiveTime]:
    """There and back, of one layer's forward; backward has the same."""
    if job.layout.expert == 1:
        return []
    place, stack = places_of(job)["expert"], job.trainer
    size = routed_rows(of) * job.model.width * (sent_once(job, place) if stack.deduplicates_tokens else 1.0)
    there = message(job, "expert", "all_to_all", size * max(stack.dispatch_bytes, of.plain.size), 1, place)
    return [there, message(job, "expert", "all_to_all", size * of.plain.size, 1, place)]


def sent_once(job: PlannedJob, place: GroupPlacement) -> float:
    """The share of rows that is left where a token goes to each node once: of K experts dealt out over N nodes, those
    on nodes that none before it is on.
    """
    nodes, chosen = place.nodes, job.model.experts_active
    return nodes * (1 - (1 - 1 / nodes) ** chosen) / chosen if nodes > 1 else 1.0


@dataclass(frozen=True)
class MicroBatchTime:
    """One micro-batch through all the layers of one rank of the pipeline."""

    forward: float
    backward: float
    again: float
    ahead: list[CollectiveTime]
    behind: list[CollectiveTime]
    weight: float

    @cached_property
    def seconds(self) -> float:
        waited = sum(sent.exposed for sent in (*self.ahead, *self.behind))
        return self.forward + self.backward + self.again + waited


def through(job: PlannedJob, of: LayerShape, counts: Counts) -> MicroBatchTime:
    """A rank of the pipeline, or one of its stages."""
    dense, banks, begins, ends = counts
    forward = backward = again = weight = 0.0
    ahead: list[CollectiveTime] = []
    behind: list[CollectiveTime] = []
    repeats = job.activation_checkpoint == "full" or (
        job.activation_checkpoint == "selective" and job.trainer.torch_native
    )
    for count, experts in ((dense, False), (banks, True)):
        if not count:
            continue
        cost = layer_time(of, experts)
        forward += count * cost.forward
        backward += count * cost.backward
        again += count * cost.again
        weight += count * cost.weight
        sent, back = tensor_messages(job, of, experts)
        there, home = context_messages(job, of, cost.look)
        rows = expert_messages(job, of) if experts else []
        repeated = [*there, *rows] if repeats else []
        ahead += [times(one, count) for one in (*sent, *there, *rows)]
        behind += [times(one, count) for one in (*back, *home, *rows, *repeated)]
    for there_is, cost in ((begins, embedding_time(of)), (ends, head_time(of))):
        if there_is:
            forward, backward, weight = forward + cost.forward, backward + cost.backward, weight + cost.weight
    return MicroBatchTime(forward, backward, again, ahead, behind, weight)


def times(sent: CollectiveTime, count: float) -> CollectiveTime:
    seconds, exposed = sent.seconds * count, sent.exposed * count
    return CollectiveTime(sent.axis, sent.kind, sent.size, sent.count * count, sent.place, seconds, exposed)


def bubble(job: PlannedJob, ranks: list[MicroBatchTime]) -> float:
    """Seconds that the slowest rank waits for others' first and last passes, in closed form."""
    if len(ranks) == 1:
        return 0.0
    others = sum(one.seconds for one in ranks) - max(one.seconds for one in ranks)
    return others * (1 / find_schedule(job.schedule).bubble_divisor(job.stages_per_rank))


def simulated_bubble(job: PlannedJob, of: LayerShape, ranks: list[MicroBatchTime]) -> float:
    """The same from the schedule itself, pass by pass, each stage with its own seconds. Rounds of micro-batches in full
    course wait for nothing more, so that a few tell of all. In closed form where even these have too many passes.
    """
    count, micros = (
        job.layout.pipeline * job.stages_per_rank,
        representative_micro_batches(job.layout.pipeline, job.batch.accumulation),
    )
    if len(ranks) == 1 or count * micros > MOST_PASSES:
        return bubble(job, ranks)
    stages = [
        through(job, of, (dense, banks, stage == 0, stage == count - 1))
        for stage, (dense, banks) in enumerate(stage_counts(job))
    ]
    seconds = [
        {
            "F": one.forward + sum(sent.exposed for sent in one.ahead),
            "B": one.backward + one.again + sum(sent.exposed for sent in one.behind),
            "W": one.weight,
        }
        for one in stages
    ]
    for each in seconds:
        each["I"] = each["B"] - each["W"]
    order = schedule_orders.action_orders(job.schedule, job.layout.pipeline, micros, job.stages_per_rank)
    rows = schedule_timeline.execute_orders(order, count, lambda action: seconds[action.stage][action.op])
    busy = max(sum(slot.end - slot.start for slot in row) for row in rows)
    return float(max(row[-1].end for row in rows) - busy)


def estimate_step(
    job: PlannedJob, stages: list[MemoryEstimate], unstated: bool = False, exact: bool = False
) -> Estimate:
    """`unstated`: whether something that matters had to be assumed; `exact`: a pipeline is run pass by pass."""
    of, bill = layer_shape(job), StepTime()
    counts = counts_of(job)
    each = {kind: through(job, of, kind) for kind in set(counts)}  # most ranks have as much as others
    ranks = [each[kind] for kind in counts]
    slowest = max(each, key=lambda kind: each[kind].seconds)
    slow = each[slowest]
    micros = job.batch.accumulation
    bill.spend("forward", micros * slow.forward)
    bill.spend("backward", micros * slow.backward)
    bill.spend("recompute", micros * slow.again)
    for sent in (*slow.ahead, *slow.behind):
        tell(bill, times(sent, micros))
    bill.spend("bubble", simulated_bubble(job, of, ranks) if exact else bubble(job, ranks))
    between_stages(job, of, bill, len(ranks))
    data(job, bill, slow, slowest)
    bill.spend("update", optimizer_time(job, max(rank_parameters(job, kind).update for kind in each)))
    bill.spend("other", job.trainer.fixed_step_seconds)
    model = sum(flops_of(job))
    hardware = model + again_flops(job)
    phases = {phase: seconds for phase, seconds in bill.phases.items() if seconds > 0}
    cramped = any(stage.total > CRAMPED * job.cluster.device.memory for stage in stages)
    low, high, doubt = interval(job, phases, cramped, unstated)
    return Estimate(job, stages, phases, bill.calls, low, high, doubt, model, hardware)


def tell(bill: StepTime, sent: CollectiveTime) -> None:
    bill.spend(sent.axis.split("+")[0], sent.exposed)
    place = sent.place
    bill.calls.append(
        CollectiveCost(sent.axis, sent.kind, sent.size, sent.count, place.ranks, place.link, sent.seconds, sent.exposed)
    )


def between_stages(job: PlannedJob, of: LayerShape, bill: StepTime, ranks: int) -> None:
    """Every micro-batch passes on and comes back, through every stage that a rank has; first and last passes wait for
    all of them.
    """
    if ranks == 1:
        return
    place, stack = places_of(job)["pipeline"], job.trainer
    divided = job.layout.tensor if stack.sequence_parallel or stack.scatters_stage_outputs else 1
    size = stack.stage_output_bytes * of.tokens * job.model.width / divided
    one = message(job, "pipeline", "send", size, 1, place)
    steady = times(one, 2 * job.batch.accumulation * job.stages_per_rank)
    tell(bill, replace(steady, exposed=steady.seconds * (1 - stack.pipeline_overlap)))
    bill.spend("bubble", 2 * (ranks - 1) * one.seconds)


def data(job: PlannedJob, bill: StepTime, slow: MicroBatchTime, counts: Counts) -> None:
    """Gradients meet, and parameters come together."""
    stack = job.trainer
    for part in rank_parameters(job, counts).parts:
        shards, copies = part.shards, part.copies
        if shards.ranks > 1 and unit_by_unit(job):
            units(job, bill, part, slow, max(1, counts[0] + counts[1]))
        elif shards.ranks > 1:
            kind = "all_reduce" if stack.all_reduces_gradients else "reduce_scatter"
            count = job.batch.accumulation if job.sharding == "gradients" and job.layout.pipeline == 1 else 1
            meet(job, bill, part.axis, kind, part.numbers * summed(job), shards, slow.backward, count)
            meet(job, bill, part.axis, "all_gather", part.numbers * gathered_bytes(job), shards, slow.forward)
        if (
            part.bank and job.layout.tensor > 1 and not stack.experts_over_tensor_axis
        ):  # its ranks have other tokens each
            meetings = job.batch.accumulation if unit_by_unit(job) and job.layout.pipeline == 1 else 1
            size = part.numbers * summed(job)
            meet(job, bill, "tensor", "all_reduce", size, places_of(job)["tensor"], slow.backward, meetings)
        if copies.ranks > 1:
            size = part.numbers / shards.ranks * summed(job)
            meet(job, bill, "replicate", "all_reduce", size, copies, slow.backward)


def unit_by_unit(job: PlannedJob) -> bool:
    return job.sharding == "parameters" and not (job.trainer.keeps_stages_unsharded and job.layout.pipeline > 1)


def meet(
    job: PlannedJob,
    bill: StepTime,
    axis: str,
    kind: str,
    size: float,
    place: GroupPlacement,
    computing: float,
    count: int = 1,
) -> None:
    """A collective beside the computing of one pass, unless the software waits with it."""
    one = message(job, axis, kind, size, 1, place)
    if not job.trainer.unoverlapped_data_comm:
        one = kept(one, job.trainer.data_overlap * computing)
        bill.spend("contention", count * job.trainer.contention * (one.seconds - one.exposed))
    tell(bill, times(one, count))


def summed(job: PlannedJob) -> float:
    """Bytes in which gradients meet: those of half precision in its own, but bfloat16's by most in float32."""
    return 4.0 if job.trainer.reduce_bytes == 2 and job.precision == "bf16" else job.trainer.reduce_bytes


def gathered_bytes(job: PlannedJob) -> float:
    """Of a parameter: in the precision of compute, and in that of the weights where it is no smaller."""
    return max(job.trainer.gather_bytes, 4.0 if job.precision in ("fp32", "fp64") else 0.0)


def units(job: PlannedJob, bill: StepTime, part: ParameterGroup, slow: MicroBatchTime, count: int) -> None:
    """FSDP: unit by unit, each gathered while the one before computes, in forward and again in backward, where
    gradients are scattered beside it.
    """
    stack, micros = job.trainer, job.batch.accumulation
    place = (
        GroupPlacement(part.shards.ranks, 1) if stack.single_adapter_gathers and part.shards.nodes > 1 else part.shards
    )
    gather = message(job, part.axis, "all_gather", part.numbers / count * gathered_bytes(job), 1, place)
    scatter = message(job, part.axis, "reduce_scatter", part.numbers / count * stack.reduce_bytes, 1, place)
    ahead, behind = slow.forward / count, (slow.backward + slow.again) / count
    if job.layout.pipeline > 1:  # a schedule lets go of units after each forward, and sums gradients up by itself
        left = count * max(0.0, gather.seconds - ahead) + gather.seconds
        tell(bill, replace(times(gather, count * (micros + 1)), exposed=(micros + 1) * left))
        tell(bill, kept(times(scatter, count), slow.backward))
        bill.spend("contention", micros * count * stack.contention * min(gather.seconds, ahead))
        return
    again = 0.0 if job.run_config is not None and job.run_config.fsdp.ranks_after_forward == 1 else gather.seconds
    left = count * max(0.0, gather.seconds - ahead) + gather.seconds
    left_behind = count * max(0.0, again + scatter.seconds - behind) + scatter.seconds
    tell(bill, replace(times(gather, (2 if again else 1) * count * micros), exposed=micros * left))
    tell(bill, replace(times(scatter, count * micros), exposed=micros * left_behind))
    beside = min(gather.seconds, ahead) + min(again + scatter.seconds, behind)
    bill.spend("contention", micros * count * stack.contention * beside)


def flops_of(job: PlannedJob) -> tuple[float, float]:
    """Of matrices, and of attention with half of its square, of a step, forward and backward."""
    model, tokens = job.model, job.tokens_per_step
    met = sum(model.active_matrix_parameters(layer) * count for layer, count in kinds(job))
    return 6.0 * tokens * (
        met + model.vocab * model.width
    ), 3.0 * tokens * job.sequence * model.attention_width * model.layers


def kinds(job: PlannedJob) -> list[tuple[int, int]]:
    """A layer of each kind, and how many there are."""
    model = job.model
    return [(0, model.layers - model.moe_layers), (model.layers - 1, model.moe_layers)]


def again_flops(job: PlannedJob) -> float:
    matrices, attention = flops_of(job)
    if job.activation_checkpoint in ("full", "alternate"):
        return (
            (0.5 if job.activation_checkpoint == "alternate" else 1.0)
            * (matrices - 6.0 * job.tokens_per_step * job.model.vocab * job.model.width + attention)
            / 3
        )
    return attention / 3 if job.activation_checkpoint == "selective" and not job.trainer.flash_attention else 0.0
