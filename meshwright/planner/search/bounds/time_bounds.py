"""Lower bounds of the step time, by which the search orders candidates and skips them without estimating them.

A rank computes its layers for every micro-batch, with the communication inside of the layers that nothing hides, and
waits for the bubble of its schedule. Data parallelism adds what outlasts the computation beside it. With forward F,
backward B, gathers G and reductions R of its blocks, a rank exposes at least

| parameters and gradients | exposed |
|---|---|
| FSDP without a pipeline | G - F and G + R - B per micro-batch |
| gathered and reduced once per step | R - B; G + R if nothing overlaps |
| FSDP2 in a pipeline | R; per micro-batch the first gather of every further stage, and what of G outlasts F or B |
| the same with v > 3 stages per rank | R, and G / v for every stage that is gathered as a whole |

torch's runtime reshards a stage that is not among the next three in use: 2 (v - 3) stages per round, and three more,
are gathered as a whole. tests/planner/test_search.py compares the bounds with estimates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from meshwright.base.models.architecture import Architecture
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.planner.cost.peak_memory import activation_settings
from meshwright.planner.cost.terms.layer_time import LayerTime, embedding_time, head_time, layer_shape, layer_time
from meshwright.planner.cost.trace.activation_messages import ActivationMessages, Messages
from meshwright.planner.cost.trace.data_parallel import DataParallel, DataParallelPlan
from meshwright.planner.cost.trace.data_parallel_plan import data_parallel_plan, gradient_sizes, resharding
from meshwright.planner.cost.trace.operations import Communicate, Operation
from meshwright.planner.cost.trace.schedule_passes import LOOKAHEAD_STAGES, PassKind, Resharding
from meshwright.planner.cost.units.data_sharding import data_sharding
from meshwright.planner.cost.units.estimated_units import UnitSizes
from meshwright.planner.cost.units.group_placements import group_placements
from meshwright.planner.cost.units.stage_parameters import StageLayers, stage_parameters, stages_by_rank
from meshwright.planner.search.candidate import CandidateJob
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch, with the communication that nothing hides."""

    forward: float = 0.0
    backward: float = 0.0


class ModuleSeconds(NamedTuple):
    dense: PassSeconds
    """a block without experts"""
    moe: PassSeconds
    """a block with experts"""
    embedding: PassSeconds
    head: PassSeconds
    model: float
    """forward and backward of the whole model"""


class UnitSeconds(NamedTuple):
    """Data parallelism of the smallest block."""

    gather: float
    reduce: float
    plan: DataParallelPlan
    resharding: Resharding


class RankLayers(NamedTuple):
    """What the stages of a pipeline rank have."""

    dense: int
    moe: int
    is_first: bool
    is_last: bool
    sends: int
    """sends per micro-batch to other ranks, forward and backward"""


class RankSeconds(NamedTuple):
    """What pipeline ranks with equal stages take."""

    computed: float
    """seconds of a step, with the communication that nothing hides"""
    layers: int
    forward: float
    """seconds of one micro-batch"""
    backward: float


class ExecutionSeconds(NamedTuple):
    """What candidates take whose shard groups differ, without data parallelism."""

    pipeline: int
    stages: int
    """stages per rank"""
    single_stage: bool
    """whether the schedule has one stage per rank"""
    micro_batches: int
    ranks: tuple[RankSeconds, ...]
    bubble: float
    """with the sends that nothing overlaps"""
    fixed: float


class TimeBounds:
    """Lower bounds of the step times of candidates. Equal parts of different candidates are computed once."""

    def __init__(self) -> None:
        self._modules: dict[Hashable, ModuleSeconds] = {}
        self._sends: dict[Hashable, tuple[float, float]] = {}
        self._profiles: dict[int, int] = {}
        self._numbers: dict[TrainerProfile, int] = {}
        self._layers: dict[Hashable, Counter[RankLayers]] = {}
        self._units: dict[Hashable, UnitSeconds] = {}

    def unscheduled_seconds(self, each: CandidateJob, bubble_divisor: int) -> float:
        """A lower bound of the step time on every schedule with at most this divisor of the bubble. The slowest rank of
        a pipeline takes at least the mean of all ranks, and longer if the others take less.
        """
        pipeline = each.candidate.layout.pipeline
        passes = each.micro_batches + (pipeline - 1) / bubble_divisor
        return (
            passes * self.modules(each, each.candidate.stages_per_rank).model / pipeline
            + each.trainer.fixed_step_seconds
        )

    def execution(self, each: CandidateJob, schedule: str, stages: int) -> ExecutionSeconds:
        """What candidates on a schedule take whose shard groups differ."""
        modules, (exposed_send, hidden_send) = self.modules(each, stages), self.send(each)
        pipeline, micro_batches = each.candidate.layout.pipeline, each.micro_batches
        slowest = total = bubble = 0.0
        rows = []
        for layers, ranks in self.layers(each, schedule, stages).items():
            forward, backward = [
                layers.dense * dense + layers.moe * moe + layers.is_first * embedding + layers.is_last * head
                for dense, moe, embedding, head in zip(*modules[:4], strict=True)
            ]
            computed = forward + backward + layers.sends * exposed_send
            slowest, total = max(slowest, computed), total + ranks * computed
            rows.append(RankSeconds(micro_batches * computed, layers.dense + layers.moe, forward, backward))
        single_stage = SCHEDULES[schedule].single_stage
        if pipeline > 1:
            bubble = (total - slowest) / SCHEDULES[schedule].bubble_divisor(stages)
            bubble += 2 * (pipeline - 1) * hidden_send
        fixed = each.trainer.fixed_step_seconds
        return ExecutionSeconds(pipeline, stages, single_stage, micro_batches, tuple(rows), bubble, fixed)

    def modules(self, each: CandidateJob, stages: int) -> ModuleSeconds:
        candidate, layout = each.candidate, each.candidate.layout
        key = (
            *(layout.tensor, layout.context, layout.expert, candidate.context_method, candidate.micro),
            *(candidate.activation_checkpoint, self.profile(each.trainer)),
            # Experts communicate in other groups, and beside other micro-batches.
            layout.expert > 1 and (each.data_sharding.expert_stride, stages > 1),
        )
        if key not in self._modules:
            self._modules[key] = module_seconds(each.make(candidate._replace(stages_per_rank=stages)))
        return self._modules[key]

    def profile(self, trainer: TrainerProfile) -> int:
        """A number that trainers share whose computation takes the same time."""
        if id(trainer) not in self._profiles:
            known = replace(trainer, gradient_bytes=0, compresses_gradients=False, offloads_optimizer=False)
            self._profiles[id(trainer)] = self._numbers.setdefault(known, len(self._numbers))
        return self._profiles[id(trainer)]

    def send(self, each: CandidateJob) -> tuple[float, float]:
        """The seconds of one send to another stage that are exposed, and those that are hidden."""
        candidate, layout = each.candidate, each.candidate.layout
        if layout.pipeline == 1:
            return 0.0, 0.0
        stage_ranks = layout.ranks // layout.pipeline
        key = layout.tensor, layout.context, candidate.micro, stage_ranks, self.profile(each.trainer)
        if key not in self._sends:
            job = each.make(candidate)
            send = ActivationMessages(job, layer_shape(job)).send()
            self._sends[key] = max(0.0, send.seconds - send.hidden), min(send.seconds, send.hidden)
        return self._sends[key]

    def layers(self, each: CandidateJob, schedule: str, stages: int) -> Counter[RankLayers]:
        """How many pipeline ranks have which layers."""
        key = each.candidate.layout.pipeline, schedule, stages
        if key not in self._layers:
            self._layers[key] = Counter(rank_layers(each.make(each.member(schedule, stages))))
        return self._layers[key]

    def unit(self, each: CandidateJob, layout: Layout) -> UnitSeconds:
        """Data parallelism with a layout of the candidate's sharding."""
        key = layout, each.candidate.sharding, each.micro_batches > 1, id(each.trainer)
        if key not in self._units:
            self._units[key] = unit_seconds(each.make(each.candidate._replace(layout=layout)))
        return self._units[key]


def least_seconds(execution: ExecutionSeconds, unit: UnitSeconds) -> float:
    """A lower bound of the step time of an execution."""
    busiest = max([rank.computed + exposed_seconds(execution, rank, unit) for rank in execution.ranks])
    return busiest + execution.bubble + execution.fixed


def exposed_seconds(execution: ExecutionSeconds, rank: RankSeconds, unit: UnitSeconds) -> float:
    """What data parallelism exposes at least in a step of a rank; see the table above."""
    pipeline, stages, single_stage, micro_batches, *_ = execution
    _, layers, forward, backward = rank
    gather, reduce, plan = layers * unit.gather, layers * unit.reduce, unit.plan
    if plan.unshards and plan.pipelined:
        exposed = reduce
        if unit.resharding == "reshards":
            first = min(layers, max(0, stages - 1)) * unit.gather
            exposed += micro_batches * (first + max(0.0, gather - first - max(forward, backward)))
        if stages > LOOKAHEAD_STAGES:
            rounds = max(1, micro_batches // pipeline)
            whole = 2 * (stages - LOOKAHEAD_STAGES) * rounds + LOOKAHEAD_STAGES
            exposed = max(exposed, reduce + whole * gather / stages)
        elif unit.resharding == "stays" and not single_stage:
            exposed += gather
        return exposed
    if not plan.overlaps:
        return reduce + (gather if unit.resharding == "once" else 0.0)
    if unit.resharding == "reshards":
        last = max(0.0, gather + reduce - backward) if plan.shards_gradients else max(0.0, reduce - backward)
        return micro_batches * max(0.0, gather - forward) + (micro_batches if plan.shards_gradients else 1) * last
    return max(0.0, reduce - backward)


def unit_seconds(job: PlannedJob) -> UnitSeconds:
    """The collectives of the parameters of the smallest block, and of its gradients."""
    layout, plan = job.layout, data_parallel_plan(job)
    compute_bytes = activation_settings(job).compute_bytes
    sizes = UnitSizes(job, compute_bytes)
    data = DataParallel(job, plan, gradient_sizes(job, compute_bytes), group_placements(job)["tensor"])
    gathers, reductions = [], []
    for moe in model_kinds(job):
        one = StageLayers(int(not moe), int(moe), False, False)
        apart = data_sharding(job).experts_apart
        block = stage_parameters(job.model, one, layout.tensor, layout.expert, layout.pipeline == 1, apart)
        unit = sizes.unit(block.block, share=block.trained_share(job.trained))
        kind = PassKind(0, "B", "sharded")
        gathers.append(communication_seconds(data.gather(unit, kind)) if resharding(job, plan) != "local" else 0.0)
        reductions.append(communication_seconds(data.reduction(unit, kind)))
    return UnitSeconds(min(gathers), min(reductions), plan, resharding(job, plan))


def communication_seconds(operations: Iterable[Operation]) -> float:
    return sum(operation.seconds for operation in operations if isinstance(operation, Communicate))


def module_seconds(job: PlannedJob) -> ModuleSeconds:
    shape = layer_shape(job)
    messages = ActivationMessages(job, shape)

    def seconds(time: LayerTime, part: Messages) -> PassSeconds:
        return PassSeconds(
            time.forward + exposed(part.forward),
            time.backward + time.recompute + exposed(part.backward) + exposed(part.recomputed),
        )

    kinds = [PassSeconds(), PassSeconds()]
    for moe in model_kinds(job):
        time = layer_time(shape, moe)
        kinds[moe] = seconds(time, messages.block(moe, time))
    embedding = seconds(embedding_time(shape), messages.embedding(frozen=not job.trained.before))
    head, moe_layers = seconds(head_time(shape), messages.head()), moe_layer_count(job)
    blocks = (job.model.layers - moe_layers) * sum(kinds[False]) + moe_layers * sum(kinds[True])
    return ModuleSeconds(kinds[False], kinds[True], embedding, head, blocks + sum(embedding) + sum(head))


def exposed(messages: Iterable[Communicate]) -> float:
    """Seconds that computation does not hide."""
    return sum(max(0.0, each.seconds - each.hidden) for each in messages)


def moe_layer_count(job: PlannedJob) -> int:
    return job.model.moe_layers if isinstance(job.model, Architecture) else 0


def model_kinds(job: PlannedJob) -> set[bool]:
    """Whether the model has blocks with and without experts."""
    return {layer >= job.model.layers - moe_layer_count(job) for layer in (0, job.model.layers - 1)}


def rank_layers(job: PlannedJob) -> Iterator[RankLayers]:
    for stages in stages_by_rank(job):
        yield RankLayers(
            sum(stage.dense_layers for stage in stages),
            sum(stage.moe_layers for stage in stages),
            any(stage.is_first for stage in stages),
            any(stage.is_last for stage in stages),
            sum(
                (not (stage.is_last or stage.next_on_rank)) + (not (stage.is_first or stage.previous_on_rank))
                for stage in stages
            ),
        )
