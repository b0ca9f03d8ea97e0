"""The pipeline stages of one rank: the model's own forward, with stand-ins for the modules of other stages.

Every stage has a copy of the modules that contain blocks. Blocks, and the modules before and after them, are the same
objects as in the model, where they keep their parameter names. The model itself loses the modules of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from meshwright.base.config.parallelism import ScheduleName
from meshwright.base.topology.parameter_shards import PipelinePlacement
from meshwright.base.topology.schedules import rank_of_stage
from meshwright.core.parallel.parallel_spec import ParallelSpec, find_blocks, require_modules
from meshwright.core.parallel.pipeline_parallel.model_trace import ModelTracer, shown
from meshwright.core.parallel.pipeline_parallel.stand_ins import (
    BlockRole,
    BlockStandIn,
    OuterStandIn,
    StageOutput,
    StagePass,
    TensorShape,
)
from meshwright.core.parallel.pipeline_parallel.tied_weights import TiedWeight, separate_tied_weights
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class StagePlan:
    """The schedule of a pipeline and the stages of this rank."""

    schedule: ScheduleName
    ranks: int
    rank: int
    placement: PipelinePlacement
    """the stages of this rank and their blocks"""

    @property
    def last_stage(self) -> int:
        return self.placement.stage_count - 1

    def rank_of_stage(self, stage: int) -> int:
        """The pipeline rank that has a stage."""
        return rank_of_stage(self.schedule, self.ranks, stage)


@dataclass(frozen=True)
class Vacancy:
    """A place in a stage where a module of another stage was."""

    parent: nn.Module
    attribute: str
    name: str
    """the name of the module in the full model"""


@dataclass(frozen=True)
class ParameterVacancy:
    """A place in a stage where a parameter of a module that contains blocks was; the first stage has it."""

    parent: nn.Module
    attribute: str
    shape: TensorShape


Vacancies = list[Vacancy | ParameterVacancy]


class Stage(nn.Module):
    """The model's forward from the hidden states that arrive to those that leave, or to the loss in the last stage."""

    def __init__(
        self,
        model: nn.Module,
        index: int,
        blocks: range,
        is_last: bool,
        vacancies: Vacancies,
        containers: list[tuple[nn.Module, nn.Module]],
    ) -> None:
        super().__init__()
        self.model = model
        self.index, self.blocks, self.is_last = index, blocks, is_last
        self.vacancies, self.containers = vacancies, containers
        self.current: list[StagePass] = []
        """the pass that runs now, which all stand-ins of the stage see"""
        self.output = TensorShape((), torch.float32)
        """what the stage returns"""
        self.autocast: Callable[[], AbstractContextManager[None]] = nullcontext
        """the context of forward only: a schedule runs backward in the same call"""

    def fill_vacancies(self, tracer: ModelTracer) -> None:
        """Puts stand-ins where modules of other stages were. No axis of parallelism has seen them."""
        block_names = list(tracer.blocks)
        for vacancy in self.vacancies:
            if isinstance(vacancy, ParameterVacancy):
                vars(vacancy.parent)[vacancy.attribute] = vacancy.shape.zeros(tracer.device)
                continue
            if vacancy.name in tracer.blocks:
                index = block_names.index(vacancy.name)
                original = tracer.blocks[vacancy.name]
                stand_in: nn.Module = BlockStandIn(original, self.current, index, self.role_of(index))
            else:
                original = (tracer.before | tracer.after)[vacancy.name]
                stand_in = OuterStandIn(original, self.current, vacancy.name)
            vacancy.parent._modules[vacancy.attribute] = stand_in

    def role_of(self, block: int) -> BlockRole:
        """What the stand-in for a block of another stage does."""
        if self.index and block == self.blocks[0] - 1:
            return "enter"
        return "leave" if not self.is_last and block == self.blocks[-1] + 1 else "pass"

    def forward(self, hidden: Tensor | None = None, **batch: Tensor) -> Tensor:
        """The hidden states of the previous stage, and all tensors of the micro-batch -> hidden states, or the sum of
        losses in the last stage.
        """
        now = self.current[0]
        now.received = hidden
        now.calls.clear()
        for copied, original in self.containers:
            copied.training = original.training
        try:
            with self.autocast():
                total, _ = self.model(*batch.values())
                return total.reshape(1)  # type: ignore[no-any-return]
        except StageOutput as output:
            result = output.hidden.contiguous()  # to be sent
        finally:
            now.received = None
        if TensorShape.of(result) != self.output:
            raise ConfigError(
                f"stage {self.index} of the pipeline returns hidden states of shape {tuple(result.shape)} and dtype "
                f"{result.dtype}; expected {self.output.shape} and {self.output.dtype}, as in the model without a "
                "pipeline",
                "try to name what changes the shape in ParallelSpec.tp_plan, or layout.pipeline = 1",
            )
        if torch.is_grad_enabled() and not result.requires_grad:  # every parameter of the stage is frozen
            return result.detach().requires_grad_()
        return result


@dataclass
class PipelineStages:
    """The stages of this rank, and what they share."""

    stages: dict[int, Stage]
    tracer: ModelTracer
    tied: list[TiedWeight]


def divide_into_stages(
    model: nn.Module, spec: ParallelSpec, plan: StagePlan, device: torch.device, weights: torch.dtype
) -> PipelineStages:
    """Divides the model into the stages of this rank, and removes what only other ranks have from it. `weights` is the
    dtype that trained weights will have.
    """
    parts = find_stage_modules(model, spec)
    tracer = ModelTracer(model, parts.blocks, parts.before, parts.after, device, weights)
    placement = plan.placement
    tied = separate_tied_weights(
        model,
        [module for _, module in parts.blocks],
        [module for _, module in parts.after],
        (plan.rank_of_stage(0), plan.rank_of_stage(plan.last_stage)),
        (placement.has_first_stage, placement.has_last_stage),
    )
    stages = {}
    everywhere: set[int] = set()
    for index, span in placement.stages.items():
        is_last = index == plan.last_stage
        local = [parts.blocks[block] for block in span]
        local += (parts.before if index == 0 else []) + (parts.after if is_last else [])
        copier = ContainerCopier(parts, {id(module) for _, module in local}, is_first=index == 0)
        stages[index] = Stage(copier.copy(model), index, span, is_last, copier.vacancies, copier.containers)
        everywhere |= copier.local
    for container in parts.containers.values():
        for name, child in container._modules.items():
            if id(child) in parts.names and id(child) not in everywhere:
                container._modules[name] = None
        if not placement.has_first_stage:
            container._parameters.update(dict.fromkeys(container._parameters))
    return PipelineStages(stages, tracer, tied)


Named = list[tuple[str, nn.Module]]


@dataclass(frozen=True)
class StageModules:
    """The modules of a model that belong to one stage each, and the modules that contain them."""

    blocks: Named
    before: Named
    after: Named
    containers: dict[int, nn.Module]

    @cached_property
    def names(self) -> dict[int, str]:
        return {id(module): name for name, module in (*self.blocks, *self.before, *self.after)}


def find_stage_modules(model: nn.Module, spec: ParallelSpec) -> StageModules:
    """Finds the parts of a model. A parameter of none of them is a ConfigError, except for those of modules that
    contain blocks. The loss beside a model (Objective.loss) follows its head.
    """
    names = {id(module): name for name, module in model.named_modules()}

    def with_parameters(modules: list[nn.Module]) -> Named:
        return [(names[id(module)], module) for module in modules if any(True for _ in module.parameters())]

    blocks = [(names[id(block)], block) for block in find_blocks(model, spec)]
    before, after = (with_parameters(require_modules(model, ends)) for ends in (spec.before, spec.after))
    after += with_parameters([loss for name, loss in model.named_children() if name == "loss"])
    parts = StageModules(blocks, before, after, {})
    inside = {id(module) for _, part in (*blocks, *before, *after) for module in part.modules()}

    def visit(module: nn.Module) -> bool:
        """Whether a module is a part, or contains one."""
        if id(module) in parts.names:
            return True
        children = [visit(child) for child in module.children()]
        if any(children):
            parts.containers[id(module)] = module
        return id(module) in parts.containers

    visit(model)
    for name, module in model.named_modules():
        if id(module) not in inside and id(module) not in parts.containers and module._parameters:
            raise ConfigError(
                f"layout.pipeline: {shown(name)} has parameters, and is neither inside of a block nor before or after "
                "the blocks, so no stage has it",
                f"try to name {shown(name)} in ParallelSpec.before or after",
            )
    return parts


class ContainerCopier:
    """Copies the modules that contain parts for one stage, without the parts of other stages. All other modules are
    shared with the model.
    """

    def __init__(self, parts: StageModules, local: set[int], is_first: bool) -> None:
        self.parts, self.local, self.is_first = parts, local, is_first
        self.vacancies: Vacancies = []
        self.containers: list[tuple[nn.Module, nn.Module]] = []
        """(copy, original)"""
        self.copies: dict[int, nn.Module] = {}

    def copy(self, module: nn.Module) -> nn.Module:
        if id(module) not in self.parts.containers:
            return module
        if id(module) not in self.copies:
            duplicate = self.copies[id(module)] = object.__new__(type(module))
            vars(duplicate).update(vars(module))  # buffers are shared, and the parameters of the first stage
            duplicate._modules = dict(self.children(module, duplicate))
            self.containers.append((duplicate, module))
            if not self.is_first:
                duplicate._parameters = dict.fromkeys(module._parameters)
                shapes = {k: TensorShape.of(p) for k, p in module._parameters.items() if p is not None}
                self.vacancies += [ParameterVacancy(duplicate, name, shape) for name, shape in shapes.items()]
        return self.copies[id(module)]

    def children(self, module: nn.Module, duplicate: nn.Module) -> Iterator[tuple[str, nn.Module | None]]:
        for name, child in module._modules.items():
            if child is None or id(child) in self.local or id(child) not in self.parts.names:
                yield name, child and self.copy(child)
            else:
                self.vacancies.append(Vacancy(duplicate, name, self.parts.names[id(child)]))
                yield name, None
