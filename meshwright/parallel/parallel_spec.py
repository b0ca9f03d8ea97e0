"""What a layout must know of a model: its blocks, what lies at its ends, and how its matrices are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.errors import ConfigError


def no_cuts() -> Mapping[str, ParallelStyle]:
    return {}


@dataclass(frozen=True)
class ParallelSpec:
    """A model of your own brings one of these to be sharded or cut: `train(config, model=..., loss=..., parts=...)`.

    Names are of modules as `named_modules` gives them, `*` standing for anything.
    """

    blocks: str
    """the repeated blocks: gathered, recomputed and compiled one by one"""
    outer_modules: tuple[tuple[str, ...], ...] = ()
    """what else is gathered together, in groups; the rest is gathered for the whole pass"""
    tp_plan: Callable[[], Mapping[str, ParallelStyle]] = field(default=no_cuts)
    """for the tensor axis: module -> torch's style of cutting it. Every rank of the axis must come to the same loss"""

    def under_objective(self) -> ParallelSpec:
        """The same, seen from the module that holds the model beside its loss."""
        ends = tuple(tuple(f"model.{name}" for name in group) for group in self.outer_modules)
        cuts = self.tp_plan
        return ParallelSpec(
            f"model.{self.blocks}", ends, lambda: {f"model.{name}": style for name, style in cuts().items()}
        )

    def restricted_to(self, model: nn.Module) -> ParallelSpec:
        """The same of a model of which only a part is left."""
        ends = (tuple(name for name in group if find_modules(model, name)) for group in self.outer_modules)
        cuts = {name: style for name, style in self.tp_plan().items() if find_modules(model, name)}
        return ParallelSpec(self.blocks, tuple(group for group in ends if group), lambda: cuts)


def find_blocks(model: nn.Module, parts: ParallelSpec) -> list[nn.Module]:
    found = find_modules(model, parts.blocks)
    if not found:
        raise ConfigError(
            f"no module of the model is called {parts.blocks}", "allowed: the name of its blocks, such as layers.*"
        )
    return found


def find_modules(model: nn.Module, pattern: str) -> list[nn.Module]:
    depth = pattern.count(".")
    everywhere = model.named_modules(remove_duplicate=False)
    found = [module for name, module in everywhere if name.count(".") == depth and fnmatchcase(name, pattern)]
    return list(dict.fromkeys(found))  # a module may stand in several places


Unit = list[nn.Module]


def fsdp_units(model: nn.Module, parts: ParallelSpec) -> tuple[list[Unit], Unit | None]:
    """(what is gathered together, in the order of use; the one of them that leads into the blocks). An end that shares
    a parameter with anything is left to the whole: FSDP2 would take the gradient of one use for the whole gradient.
    """
    ends = [require_modules(model, group) for group in parts.outer_modules]
    blocks = [[block] for block in find_blocks(model, parts)]
    held = Counter(id(p) for _, _, p in parameter_owners(model))
    shared = {parameter for parameter, places in held.items() if places > 1}
    apart = [end for end in ends if not parameter_ids(end) & shared]
    if any(parameter_ids(end) & parameter_ids(block) for end in ends for block in blocks):
        raise ConfigError(
            "ParallelSpec.ends names a block, or a part of one", "allowed: what lies outside of the blocks"
        )
    leading = ends[0] if ends and ends[0] in apart else None
    for block in blocks:
        inside = Counter(id(p) for _, _, p in parameter_owners(block[0]))
        places = sum(module is block[0] for _, module in model.named_modules(remove_duplicate=False))
        if any(inside[parameter] * places < held[parameter] for parameter in inside):
            raise ConfigError(
                "a block of the model shares a parameter with another part and cannot be gathered by itself",
                "allowed: parameters shared outside of the blocks, or within one",
            )
    if any(parameter.ndim == 0 for parameter in model.parameters()):
        raise ConfigError(
            "a parameter of the model is a single number, which has no rows to divide", "allowed: shape (1,)"
        )
    return ([leading] if leading else []) + blocks + [end for end in apart if end is not leading], leading


def require_modules(model: nn.Module, names: tuple[str, ...]) -> Unit:
    found = [(name, find_modules(model, name)) for name in names]
    if missing := [name.removeprefix("model.") for name, modules in found if not modules]:
        raise ConfigError(
            f"no module of the model is called {missing[0]}, as ParallelSpec says", "allowed: names of modules"
        )
    return [module for _, modules in found for module in modules]


def parameter_ids(modules: list[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}


def parameter_owners(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every place that holds a parameter; one that is shared comes more than once."""
    for _, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter
