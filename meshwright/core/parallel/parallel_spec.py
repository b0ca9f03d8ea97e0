"""ParallelSpec: what parallelism needs to know of a model: its blocks, the modules around them, and its TP plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.base.models.spec import AttentionSeam
from meshwright.errors import ConfigError


def empty_tp_plan() -> Mapping[str, ParallelStyle]:
    return {}


@dataclass(frozen=True)
class ParallelSpec:
    """How a user's model is parallelized: `train(config, model=..., loss=..., parallel_spec=ParallelSpec(...))`.

    Names are those of `model.named_modules()`; `*` matches anything within one level. Fields that are not given are
    inferred from the model (`infer_parallel_spec`).
    """

    blocks: str | tuple[str, ...] = ""
    """the repeated blocks, such as `layers.*`, or several such names in the order of their use: each block is one FSDP
    unit, checkpointed and compiled by itself; the first argument of a block and its result are the hidden states that
    pipeline stages exchange. A model without repeated blocks is one block
    """
    before: tuple[str, ...] = ()
    """modules with parameters that run before the blocks, such as the embedding: one FSDP unit, in the first pipeline
    stage
    """
    after: tuple[str, ...] = ()
    """modules with parameters that run after the blocks, such as the last norm and the head: one FSDP unit, in the last
    pipeline stage. Parameters of neither group belong to the root unit, which stays unsharded during the whole pass
    """
    tp_plan: Callable[[], Mapping[str, ParallelStyle]] = field(default=empty_tp_plan)
    """for tensor parallelism: returns the plan of `torch.distributed.tensor.parallel.parallelize_module`, module ->
    ParallelStyle. All tensor-parallel ranks must compute the same loss
    """
    positions: str = ""
    """for context parallelism: the argument of the model's forward that takes the position of every token, such as
    `position_ids`
    """
    experts: str = ""
    """for expert parallelism: the modules with the weights of all experts, such as `layers.*.mlp.experts`. The first
    dimension of their parameters is that of the experts, and their forward takes (hidden states, chosen experts,
    weights of the chosen experts)
    """
    attention: AttentionSeam = field(default_factory=AttentionSeam)
    """for context parallelism: the modules of a built-in family that attend; without them, calls of
    `torch.nn.functional.scaled_dot_product_attention` and of transformers' attention interface are replaced
    """
    tied: tuple[tuple[str, ...], ...] = ()
    """parameters with several names, each with all of its names. They are seen in the model, not declared
    """

    @property
    def block_patterns(self) -> tuple[str, ...]:
        return (self.blocks,) if isinstance(self.blocks, str) else self.blocks

    def under_objective(self) -> ParallelSpec:
        """The same spec for the module that contains the model as `model`, beside its loss."""
        tp_plan, seam = self.tp_plan, self.attention.modules
        return replace(
            self,
            blocks=tuple(f"model.{pattern}" if pattern else "model" for pattern in self.block_patterns),
            before=tuple(f"model.{name}" for name in self.before),
            after=tuple(f"model.{name}" for name in self.after),
            tp_plan=lambda: {f"model.{name}": style for name, style in tp_plan().items()},
            experts=f"model.{self.experts}" if self.experts else "",
            attention=replace(self.attention, modules=seam and f"model.{seam}"),
            tied=tuple(tuple(f"model.{name}" for name in names) for names in self.tied),
        )

    def restricted_to(self, model: nn.Module) -> ParallelSpec:
        """The same spec without the modules that a pipeline rank does not have."""
        tp_plan = {name: style for name, style in self.tp_plan().items() if find_modules(model, name)}
        return replace(
            self,
            blocks=tuple(pattern for pattern in self.block_patterns if find_modules(model, pattern)),
            before=tuple(name for name in self.before if find_modules(model, name)),
            after=tuple(name for name in self.after if find_modules(model, name)),
            tp_plan=lambda: tp_plan,
        )


def find_blocks(model: nn.Module, spec: ParallelSpec) -> list[nn.Module]:
    """The blocks in the order of use. A name that matches no module is a ConfigError."""
    blocks = {pattern: find_modules(model, pattern) for pattern in spec.block_patterns}
    for pattern, found in blocks.items():
        if not found:
            raise ConfigError(
                f"ParallelSpec.blocks = {pattern} matches no module of the model",
                "expected the name of its blocks, such as layers.*",
            )
    return list(dict.fromkeys(block for found in blocks.values() for block in found))


def find_modules(model: nn.Module, pattern: str) -> list[nn.Module]:
    depth = pattern.count(".")
    modules = model.named_modules(remove_duplicate=False)
    matches = [module for name, module in modules if name.count(".") == depth and fnmatchcase(name, pattern)]
    return list(dict.fromkeys(matches))  # a module may have several names


def copy_module(module: nn.Module, attributes: Mapping[str, object]) -> nn.Module:
    """A shallow copy with other attributes, parameters included; it shares everything else with the module."""
    copied: nn.Module = object.__new__(type(module))  # FSDP2's classes construct the original class instead
    vars(copied).update(vars(module))
    copied._parameters = {name: p for name, p in module._parameters.items() if name not in attributes}
    vars(copied).update(attributes)
    return copied


Unit = list[nn.Module]
"""Modules that form one FSDP unit."""


def fsdp_units(model: nn.Module, spec: ParallelSpec) -> tuple[list[Unit], Unit | None]:
    """(all FSDP units in the order of use, the unit that precedes the blocks if there is one).

    Outer modules that share a parameter with other modules are left to the root unit: FSDP2 would take the gradient of
    one use for the full gradient.
    """
    before, after = require_modules(model, spec.before), require_modules(model, spec.after)
    outer_units = [unit for unit in (before, after) if unit]
    blocks = [[block] for block in find_blocks(model, spec) if block is not model]
    uses = Counter(id(parameter) for _, _, parameter in parameter_owners(model))
    shared = {parameter for parameter, count in uses.items() if count > 1}
    if any(parameter_ids(unit) & parameter_ids(block) for unit in outer_units for block in blocks):
        raise ConfigError(
            "ParallelSpec.before or after contains a block, or a module of one",
            "expected modules outside of the blocks",
        )
    for block in blocks:
        uses_inside = Counter(id(parameter) for _, _, parameter in parameter_owners(block[0]))
        names_of_block = sum(module is block[0] for _, module in model.named_modules(remove_duplicate=False))
        outside = {p for p in uses_inside if uses_inside[p] * names_of_block < uses[p]}
        if outside:
            names = [n for n, p in model.named_parameters(remove_duplicate=False) if id(p) in outside]
            raise ConfigError(
                f"a block of the model shares a parameter with another module ({' = '.join(names[:2])}), so it cannot "
                "be an FSDP unit",
                "try to share parameters only outside of the blocks, or within one block",
            )
    separate = [unit for unit in outer_units if not parameter_ids(unit) & shared]
    first = before if before in separate else None
    return ([first] if first else []) + blocks + [unit for unit in separate if unit is not first], first


def require_modules(model: nn.Module, names: tuple[str, ...]) -> Unit:
    """The modules of these names; a name that matches none is a ConfigError."""
    matches = [(name, find_modules(model, name)) for name in names]
    if missing := [name for name, modules in matches if not modules]:
        raise ConfigError(
            f"ParallelSpec names {missing[0]}, and the model has no such module", "expected names of named_modules()"
        )
    return [module for _, modules in matches for module in modules]


def parameter_ids(modules: list[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}


def parameter_owners(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module, attribute, parameter) of every use of a parameter; a shared parameter comes more than once."""
    for _, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def tied_parameters(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """All names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)
