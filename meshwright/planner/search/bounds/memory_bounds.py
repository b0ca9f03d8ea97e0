"""Lower bounds of memory, by which the search skips candidates without estimating them.

A rank holds its parameters, gradients and optimizer state, and the activations of the micro-batches that are in flight.
tests/planner/test_search.py compares the bounds with estimates.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from operator import mul
from typing import NamedTuple

from meshwright.base.hardware.cluster import Cluster
from meshwright.base.topology.layout import Layout
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.planner.cost.peak_memory import activation_settings
from meshwright.planner.cost.terms.activations import block_activations, hidden_state_bytes
from meshwright.planner.cost.trace.schedule_passes import LOOKAHEAD_STAGES
from meshwright.planner.cost.units.data_sharding import data_sharding, layout_sharding
from meshwright.planner.cost.units.stage_parameters import (
    StageLayers,
    StageParameters,
    stage_parameters,
    stages_by_rank,
)
from meshwright.planner.search.bounds.time_bounds import model_kinds
from meshwright.planner.search.candidate import Candidate, CandidateJob
from meshwright.planner.workload.optimizer_bytes import optimizer_bytes
from meshwright.planner.workload.planned_job import PlannedJob
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.workload import Workload

LAYER_KINDS = ("dense_layers", "moe_layers")


class RankState(NamedTuple):
    """A pipeline rank in memory."""

    rank: int
    parameters: float
    """elements, without experts that are divided over ranks"""
    experts: float
    stage_layers: tuple[int, ...]
    """layers of each of its stages"""
    neighbours: int
    """stages before and after its stages"""


class RankPeaks(NamedTuple):
    """What a pipeline rank holds when its memory may be at its peak."""

    parameters: float
    experts: float
    neighbours: int
    peaks: tuple[tuple[float, int], ...]
    """the share of the gradients, and layers times micro-batches in flight, that exist at the same time"""


class StateBytes(NamedTuple):
    """Bytes per parameter."""

    kept: float
    """parameters and optimizer state"""
    gradients: float


class ActivationBytes(NamedTuple):
    """What the micro-batches of a candidate hold."""

    saved: float
    """by the smallest block for one micro-batch"""
    received: float
    """in the buffers between two stages"""
    context: float
    """what the device needs besides tensors"""


class MemoryBounds:
    """Lower bounds of the memory of the candidates of a workload. Equal parts are computed once."""

    def __init__(self, work: Workload, cluster: Cluster) -> None:
        self.work, self.on_cpu = work, cluster.device.is_cpu
        self.routes_tokens = work.model.experts > 0
        self._distinct_ranks: dict[Hashable, list[tuple[int, tuple[StageLayers, ...]]]] = {}
        self._states: dict[Hashable, tuple[RankState, ...]] = {}
        self._peaks: dict[Hashable, tuple[RankPeaks, ...]] = {}
        self._activations: dict[Hashable, tuple[float, float]] = {}
        self._optimizer_bytes: dict[int, tuple[float, float]] = {}

    def rank_peaks(self, each: CandidateJob, schedule: str, stages: int) -> tuple[RankPeaks, ...]:
        """What every rank with other stages holds."""
        layout, micro_batches = each.candidate.layout, each.micro_batches
        apart = layout.expert > 1 and each.data_sharding.experts_apart
        divided = layout.pipeline, schedule, stages, layout.tensor, layout.expert, apart
        key = *divided, micro_batches
        if key not in self._peaks:
            candidate = each.member(schedule, stages)
            if divided not in self._states:
                self._states[divided] = tuple(self.rank_states(each.make(candidate)))
            self._peaks[key] = tuple(rank_peaks(candidate, micro_batches, state) for state in self._states[divided])
        return self._peaks[key]

    def rank_states(self, job: PlannedJob) -> Iterator[RankState]:
        """The parameters of every rank with other stages."""
        layout, apart = job.layout, data_sharding(job).experts_apart
        key = layout.pipeline, job.schedule, job.stages_per_rank
        if key not in self._distinct_ranks:
            first = {stages: rank for rank, stages in reversed(list(enumerate(stages_by_rank(job))))}
            self._distinct_ranks[key] = sorted((rank, stages) for stages, rank in first.items())

        def sizes(layers: StageLayers) -> StageParameters:
            return stage_parameters(job.model, layers, layout.tensor, layout.expert, layout.pipeline == 1, apart)

        dense, moe = (sizes(StageLayers(int(not moe), int(moe), False, False)) for moe in (False, True))
        for rank, stages in self._distinct_ranks[key]:
            ends = [sizes(stage) for stage in stages if stage.is_first or stage.is_last]
            dense_layers, moe_layers = (sum(getattr(stage, name) for stage in stages) for name in LAYER_KINDS)
            yield RankState(
                rank,
                dense_layers * dense.block
                + (moe_layers * moe.block if moe_layers else 0.0)
                + sum(end.embedding + end.head for end in ends),
                moe_layers * moe.block_experts if moe_layers else 0.0,
                tuple(stage.layers for stage in stages),
                sum((not stage.is_first) + (not stage.is_last) for stage in stages),
            )

    def activation_bytes(self, each: CandidateJob) -> ActivationBytes:
        """What the micro-batches hold, whatever the schedule and the shard groups."""
        saved, received = self.block_bytes(each)
        received *= each.micro_batches
        if self.on_cpu:
            return ActivationBytes(saved, received, 0.0)
        return ActivationBytes(saved * (1 + each.trainer.allocator_slack), received, each.trainer.device_context_bytes)

    def block_bytes(self, each: CandidateJob) -> tuple[float, float]:
        """Bytes that the smallest block saves for one micro-batch, and of a buffer that receives its input."""
        candidate, layout = each.candidate, each.candidate.layout
        key = (
            *(layout.tensor, layout.context, layout.expert, candidate.context_method, candidate.micro),
            *(candidate.activation_checkpoint, each.data_sharding.fsdp, layout.pipeline > 1, id(each.trainer)),
        )
        if key not in self._activations:
            job = each.make(candidate)
            settings = activation_settings(job)
            saved = min(block_activations(job.model, settings, moe).saved for moe in model_kinds(job))
            receives = job.trainer.torch_native and layout.pipeline > 1
            self._activations[key] = saved, hidden_state_bytes(job.model, settings) if receives else 0.0
        return self._activations[key]

    def state_bytes(self, each: CandidateJob, stages: int, layout: Layout) -> tuple[StateBytes, StateBytes]:
        """A lower bound of the bytes of a parameter, its optimizer state and its gradient on a rank, and of those of an
        expert's: shards divide evenly.

        FSDP2 accumulates the gradients of a pipeline's micro-batches unsharded, at least those of one stage, and those
        of a single micro-batch are sharded as soon as they are reduced.
        """
        # In a single round stages are complete one after the other.
        one_round = each.micro_batches < 2 * each.candidate.layout.pipeline
        groups = layout_sharding(layout, each.candidate.sharding, each.trainer)
        optimizer = self.optimizer_bytes(each.trainer)
        dense = state_bytes(each, stages, groups.dense.shards, one_round, optimizer)
        return dense, state_bytes(
            each, stages, groups.experts.shards, one_round, optimizer
        ) if self.routes_tokens else dense

    def optimizer_bytes(self, trainer: TrainerProfile) -> tuple[float, float]:
        """Bytes of optimizer state per parameter, and the fraction of the parameters that are trained: that of the unit
        with the smallest one.
        """
        if id(trainer) not in self._optimizer_bytes:
            trained = self.work.trained.least
            state = optimizer_bytes(trainer, self.work.base_config, self.work.model)
            self._optimizer_bytes[id(trainer)] = state * trained, trained
        return self._optimizer_bytes[id(trainer)]


def least_bytes(
    ranks: tuple[RankPeaks, ...], activations: ActivationBytes, state: tuple[StateBytes, StateBytes]
) -> float:
    """A lower bound of the memory of the rank that needs most; `state` is that of `MemoryBounds.state_bytes`."""
    saved, received, context = activations
    (kept, gradients), (kept_by_experts, gradients_of_experts) = state
    most = 0.0
    for parameters, experts, neighbours, peaks in ranks:
        gradient = parameters * gradients + experts * gradients_of_experts
        peak = max([share * gradient + saved * layers for share, layers in peaks])
        most = max(most, parameters * kept + experts * kept_by_experts + neighbours * received + peak)
    return most + context


def state_bytes(
    each: CandidateJob, stages: int, shards: int, one_round: bool, optimizer: tuple[float, float]
) -> StateBytes:
    """See `MemoryBounds.state_bytes`; `optimizer` is what `MemoryBounds.optimizer_bytes` returns."""
    candidate, trainer = each.candidate, each.trainer
    sharding = candidate.sharding
    compute = 4.0 if each.precision in ("fp32", "fp64") else 2.0
    pipelined, native = candidate.layout.pipeline > 1, trainer.torch_native
    ranks = shards if sharding != "none" else 1
    parameters = trainer.parameter_bytes / (ranks if sharding == "parameters" else 1)
    if native and sharding in ("optimizer", "gradients"):  # shards, and a copy of them in the compute dtype
        unsharded = stages if one_round or stages > LOOKAHEAD_STAGES else 1
        parameters = min(parameters, trainer.parameter_bytes / ranks + compute / unsharded)
    divided = ranks if sharding in ("gradients", "parameters") or (native and sharding == "optimizer") else 1
    accumulates = sharding == "optimizer" or (sharding == "parameters" and pipelined)
    if native and accumulates and each.micro_batches > 1:
        divided = min(divided, stages) if pipelined and one_round else 1
    state, trainable = optimizer
    return StateBytes(
        parameters + (0.0 if candidate.offload else state / ranks), trainer.gradient_bytes * trainable / divided
    )


def rank_peaks(candidate: Candidate, micro_batches: int, state: RankState) -> RankPeaks:
    passes = passes_in_flight(candidate, micro_batches, state.rank)
    in_flight = sum(map(mul, passes, state.stage_layers))
    peaks: tuple[tuple[float, int], ...] = ((1.0, in_flight),)
    if not accumulates_when_full(candidate, micro_batches, sum(passes)):
        # When the gradients of the last stage are complete, what the other stages saved is in use.
        last = state.stage_layers[-1]
        partly = last / max(1, sum(state.stage_layers)), in_flight - passes[-1] * last
        peaks = (1.0, 0), (0.0, in_flight), partly
    return RankPeaks(state.parameters, state.experts, state.neighbours, peaks)


def passes_in_flight(candidate: Candidate, micro_batches: int, rank: int) -> tuple[int, ...]:
    """Forward passes of each stage of a rank that run before its first backward pass has ended; see
    `schedule_orders`.
    """
    ranks, stages = candidate.layout.pipeline, candidate.stages_per_rank
    if ranks == 1:
        return (1,)
    schedule, later = SCHEDULES[candidate.schedule], ranks - 1 - rank
    if schedule.all_forward_first:
        return (micro_batches,)
    if schedule.v_shaped:
        return min(micro_batches, 2 * later + 1 + rank), min(micro_batches, rank + 1)
    round_size = micro_batches // max(1, micro_batches // ranks)
    warmup = later if schedule.single_stage or schedule.splits_backward else 2 * later
    passes = min(micro_batches * stages, (stages - 1) * round_size + warmup + 1)
    rounds, rest = divmod(passes, round_size * stages)
    return tuple(rounds * round_size + min(round_size, max(0, rest - stage * round_size)) for stage in range(stages))


def accumulates_when_full(candidate: Candidate, micro_batches: int, passes: int) -> bool:
    """Whether all gradients of a rank exist while as many forward passes are in flight: backward passes of all of its
    stages have run before its last forward pass.
    """
    ranks, stages, schedule = candidate.layout.pipeline, candidate.stages_per_rank, SCHEDULES[candidate.schedule]
    if ranks == 1:
        return micro_batches > 1
    round_size = micro_batches // max(1, micro_batches // ranks)
    backward = (stages - 1) * round_size + 1 + ranks * (schedule.splits_backward + schedule.v_shaped)
    return micro_batches * stages - passes > backward
