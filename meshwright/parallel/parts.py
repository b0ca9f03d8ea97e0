"""What a layout must know of a model: its blocks, what lies at its ends, and how its matrices are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from meshwright.errors import ConfigError


def no_cuts() -> Mapping[str, ParallelStyle]:
    return {}


@dataclass(frozen=True)
class Parts:
    """A model of your own brings one of these to be sharded or cut: `train(config, model=..., loss=..., parts=...)`.

    Names are of modules as `named_modules` gives them, `*` standing for anything.
    """

    blocks: str
    """the repeated blocks: gathered, recomputed and compiled one by one"""
    ends: tuple[tuple[str, ...], ...] = ()
    """what else is gathered together, in groups; the rest is gathered for the whole pass"""
    cuts: Callable[[], Mapping[str, ParallelStyle]] = field(default=no_cuts)
    """for the tensor axis: module -> torch's style of cutting it. Every rank of the axis must come to the same loss"""

    def of_objective(self) -> Parts:
        """The same, seen from the module that holds the model beside its loss."""
        ends = tuple(tuple(f"model.{name}" for name in group) for group in self.ends)
        cuts = self.cuts
        return Parts(f"model.{self.blocks}", ends, lambda: {f"model.{name}": style for name, style in cuts().items()})


def blocks_of(model: nn.Module, parts: Parts) -> list[nn.Module]:
    found = matching(model, parts.blocks)
    if not found:
        raise ConfigError(
            f"no module of the model is called {parts.blocks}", "allowed: the name of its blocks, such as layers.*"
        )
    return found


def matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    depth = pattern.count(".")
    return [m for name, m in model.named_modules() if name.count(".") == depth and fnmatchcase(name, pattern)]


def units_of(model: nn.Module, parts: Parts) -> list[list[nn.Module]]:
    """What is gathered together, in the order of use. Groups that share a parameter are left to the whole: FSDP2 would
    take the gradient of one use for the whole gradient.
    """
    groups = [[m for name in group for m in matching(model, name)] for group in parts.ends]
    held = [parameters_of(group) for group in groups]
    apart = [g for i, g in enumerate(groups) if not any(held[i] & other for j, other in enumerate(held) if j != i)]
    blocks = [[block] for block in blocks_of(model, parts)]
    units = apart[:1] + blocks + apart[1:]
    seen: set[int] = set()
    for unit in units:
        if seen & parameters_of(unit):
            raise ConfigError(
                "two blocks of the model share a parameter and cannot be gathered one by one",
                "allowed: parameters shared outside of the blocks alone",
            )
        seen |= parameters_of(unit)
    return units


def parameters_of(modules: list[nn.Module]) -> set[int]:
    return {id(parameter) for module in modules for parameter in module.parameters()}


def owned_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every place that holds a parameter; one that is shared comes more than once."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter
