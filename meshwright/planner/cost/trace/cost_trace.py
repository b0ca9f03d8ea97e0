"""The trace of one optimizer step on one pipeline rank, from which time, communication volume and memory follow.

A step begins with what is allocated throughout and with the step control vector, runs the passes of the schedule, and
ends with the update. All ranks of a pipeline rank have the same trace. A trace of a Meshwright run is made of the run's
own parameters, and its communication volume and state memory are exact; see `rank_units`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from meshwright.base.config import RunConfig
from meshwright.base.models.registry import run_spec
from meshwright.base.models.spec import ModelSpec
from meshwright.base.models.traced_model import TracedModel
from meshwright.base.topology.schedules import SCHEDULES
from meshwright.planner.cost.terms.activations import ActivationSettings, hidden_state_bytes, input_bytes
from meshwright.planner.cost.terms.layer_time import layer_shape
from meshwright.planner.cost.terms.optimizer_time import optimizer_time
from meshwright.planner.cost.trace.activation_messages import ActivationMessages
from meshwright.planner.cost.trace.data_parallel import DataParallel, DataParallelPlan
from meshwright.planner.cost.trace.data_parallel_plan import data_parallel_plan, gradient_sizes, resharding
from meshwright.planner.cost.trace.operations import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    UNSHARDED,
    Allocate,
    Compute,
    Operation,
    Operations,
)
from meshwright.planner.cost.trace.own_messages import begin_messages, end_messages
from meshwright.planner.cost.trace.pass_memory import PassMemory, pass_memory
from meshwright.planner.cost.trace.pass_time import PassTime, pass_time
from meshwright.planner.cost.trace.pass_trace import StagePasses
from meshwright.planner.cost.trace.schedule_passes import PassKind, ScheduleSize, passes_per_step, schedule_passes
from meshwright.planner.cost.trace.state_bytes import optimizer_state_bytes
from meshwright.planner.cost.units.data_sharding import data_sharding
from meshwright.planner.cost.units.estimated_units import UnitSizes, estimated_stages
from meshwright.planner.cost.units.group_placements import group_placements
from meshwright.planner.cost.units.rank_units import RankStage, exact_stages
from meshwright.planner.workload.planned_job import PlannedJob


class CostTrace:
    """The operations of a step on one pipeline rank. Equal passes are built once."""

    def __init__(self, job: PlannedJob, settings: ActivationSettings, pipeline_rank: int = 0) -> None:
        self.job, self.settings, self.pipeline_rank = job, settings, pipeline_rank
        layout = job.layout
        self.rank = pipeline_rank * layout.stride("pipeline")
        self.schedule = ScheduleSize(job.schedule, layout.pipeline, job.batch.accumulation, job.stages_per_rank)
        self.plan: DataParallelPlan = data_parallel_plan(job)
        self.resharding = resharding(job, self.plan)
        self.partly = self.plan.ranks_after_forward > 1
        self._operations: dict[PassKind, Operations] = {}
        self._times: dict[PassKind, PassTime] = {}
        self._memory: dict[PassKind, PassMemory] = {}

    @cached_property
    def config(self) -> RunConfig | None:
        return self.job.run_config

    @cached_property
    def spec(self) -> ModelSpec | None:
        """The parameters of a Meshwright run."""
        if self.config is None:
            return None
        return self.job.model.spec if isinstance(self.job.model, TracedModel) else run_spec(self.config)

    @cached_property
    def stages(self) -> tuple[RankStage, ...]:
        if self.config is not None and self.spec is not None:
            return exact_stages(self.job, self.config, self.spec, self.rank)
        return estimated_stages(self.job, self.pipeline_rank, UnitSizes(self.job, self.settings.compute_bytes))

    @cached_property
    def builders(self) -> list[StagePasses]:
        shape = layer_shape(self.job)
        messages = ActivationMessages(self.job, shape)
        sizes = gradient_sizes(self.job, self.settings.compute_bytes)
        data = DataParallel(self.job, self.plan, sizes, group_placements(self.job)["tensor"])
        return [StagePasses(self.job, stage, self.settings, shape, messages, data) for stage in self.stages]

    @cached_property
    def equal_stages(self) -> list[int]:
        """For each stage, the first one that is equal to it."""
        return [self.stages.index(stage) for stage in self.stages]

    def operations(self, kind: PassKind) -> Operations:
        kind = kind._replace(stage=self.equal_stages[kind.stage])
        if kind not in self._operations:
            self._operations[kind] = self.builders[kind.stage].operations(kind)
        return self._operations[kind]

    def time(self, kind: PassKind) -> PassTime:
        """The time of a pass, which depends neither on earlier gradients nor on what is resharded afterwards."""
        key = kind._replace(stage=self.equal_stages[kind.stage], accumulates=True, keeps=True)
        if key not in self._times:
            self._times[key] = pass_time(self.operations(kind), self.job.trainer.contention)
        return self._times[key]

    def memory(self, kind: PassKind) -> PassMemory:
        kind = kind._replace(stage=self.equal_stages[kind.stage])
        if kind not in self._memory:
            self._memory[kind] = pass_memory(self.operations(kind))
        return self._memory[kind]

    @property
    def passes(self) -> tuple[PassKind, ...]:
        """All passes of the step, in order."""
        return schedule_passes(self.schedule, self.pipeline_rank, self.resharding, self.partly)

    @property
    def counts(self) -> tuple[tuple[PassKind, int], ...]:
        """How often each pass runs in a step."""
        return self.counts_of(self.pipeline_rank)

    def counts_of(self, pipeline_rank: int) -> tuple[tuple[PassKind, int], ...]:
        """The same on another pipeline rank with equal stages."""
        return passes_per_step(self.schedule, pipeline_rank, self.resharding, self.partly)

    @cached_property
    def begin(self) -> Operations:
        """What is allocated throughout the step, and the collectives before the first pass."""
        return (*self.persistent(), *begin_messages(self))

    @cached_property
    def end(self) -> Operations:
        """The update. Foreach kernels allocate the square roots of all second moments at once."""
        job, operations = self.job, list[Operation](end_messages(self))
        foreach = self.config is not None and self.config.optimizer.implementation != "fused"
        if foreach:
            stored = self.updated * job.trainer.parameter_bytes * (2 if job.precision == "fp64" else 1)
            operations.append(Allocate(ACTIVATIONS, stored - self.sent_at_once))
        return (*operations, Compute("update", optimizer_time(job, self.updated)))

    def walk(self) -> Iterator[Operation]:
        """The whole step, pass by pass."""
        yield from self.begin
        for kind in self.passes:
            yield from self.operations(kind)
        yield from self.end

    @cached_property
    def updated(self) -> float:
        """The elements that the rank's optimizer updates."""
        return sum(count * unit.shard for stage in self.stages for count, unit in stage.units)

    @cached_property
    def numel(self) -> float:
        """The elements of the gradients of all units, unsharded."""
        return sum(count * unit.numel for stage in self.stages for count, unit in stage.units)

    @cached_property
    def sent_at_once(self) -> float:
        """A schedule with one stage per rank has one tensor that is being sent."""
        pipelined = self.job.layout.pipeline > 1
        single = pipelined and SCHEDULES[self.job.schedule].single_stage
        return hidden_state_bytes(self.job.model, self.settings) if single else 0.0

    def persistent(self) -> Iterator[Allocate]:
        job, trainer = self.job, self.job.trainer
        pipelined, micro_steps = job.layout.pipeline > 1, job.batch.accumulation
        residual = hidden_state_bytes(job.model, self.settings)
        yield Allocate(
            PARAMETERS, sum(count * unit.stored for stage in self.stages for count, unit in stage.units)
        )  # fmt: skip
        yield Allocate(OPTIMIZER, optimizer_state_bytes(self))
        if trainer.torch_native:
            neighbours = sum((not stage.layers.is_first) + (not stage.layers.is_last) for stage in self.stages)
            yield Allocate(COMMUNICATION, neighbours * micro_steps * residual if pipelined else 0)
            # The inputs of the step, which a pipeline concatenates.
            inputs = input_bytes(job.model, self.settings) * micro_steps * (2 if pipelined else 1)
            yield Allocate(ACTIVATIONS, inputs + self.sent_at_once)
            if self.plan.gradients == "buffers":
                yield Allocate(GRADIENTS, self.numel * gradient_sizes(job, self.settings.compute_bytes).kept)
            return
        yield from self.contiguous_buffers(residual)

    def contiguous_buffers(self, residual: float) -> Iterator[Allocate]:
        """The buffers of Megatron and the trainers built on it, which are allocated once."""
        job, trainer = self.job, self.job.trainer
        gradients = self.updated if self.plan.shards_gradients else self.numel
        if self.plan.gradients == "buffers":
            yield Allocate(GRADIENTS, gradients * trainer.gradient_bytes + self.numel * trainer.accumulation_bytes)
        data_parallel = job.layout.data_degree * job.layout.context > 1
        receive = 2 * residual if job.layout.pipeline > 1 else 0.0
        yield Allocate(COMMUNICATION, receive + (trainer.bucket_bytes if data_parallel else 0.0))
        yield Allocate(ACTIVATIONS, self.sent_at_once)
        if job.sharding == "parameters" and data_sharding(job).dense.shards > 1:
            stage = self.stages[0]
            layer = sum(unit.numel for run in stage.runs[-1:] for unit in (run.unit, run.experts) if unit)
            ends = sum(unit.unsharded for each in self.stages for unit in (each.before, each.after, each.root) if unit)
            yield Allocate(UNSHARDED, 2 * layer * self.settings.compute_bytes + ends)
            yield Allocate(COMMUNICATION, layer * trainer.gradient_bytes)
