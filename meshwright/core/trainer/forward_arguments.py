"""Which entries of a sample the forward of a model takes by keyword."""

from __future__ import annotations

import difflib
import inspect

from torch import nn

from meshwright.core.data.batch_structure import BatchStructure
from meshwright.errors import ConfigError


def accepted_entries(model: nn.Module, batch: BatchStructure, with_targets: bool) -> tuple[str, ...]:
    """Returns the entries of a dict or dataclass that the model's forward gets by keyword."""
    parameters = inspect.signature(model.forward).parameters
    targets = set() if with_targets else batch.target_names()
    names = [name for name, _ in batch.root.children]
    if missing := [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and (parameter.kind is parameter.POSITIONAL_ONLY or name not in names)
    ]:
        raise ConfigError(
            f"forward of {type(model).__name__} needs {', '.join(missing)}, and samples have the entries "
            f"{', '.join(names)}",
            "expected entries with the names of forward's arguments: a dict is passed by keyword, never by position",
        )
    return tuple(name for name in names if name not in targets and accepts(model, name))


def dropped_entries(model: nn.Module, batch: BatchStructure) -> list[str]:
    """Returns the entries of a dict or dataclass, except targets, that the model's forward does not take."""
    names = [] if batch.is_tuple else [name for name, _ in batch.root.children]
    return [name for name in names if name not in batch.target_names() and not accepts(model, name)]


def describe_dropped(model: nn.Module, dropped: list[str]) -> str:
    """Returns which entries a model's forward does not take, with the arguments that have similar names."""
    arguments = list(inspect.signature(model.forward).parameters)
    similar = [(name, difflib.get_close_matches(name, arguments, 1)) for name in dropped]
    names = ", ".join(f"{name} (similar: {found[0]})" if found else name for name, found in similar)
    return f"forward of {type(model).__name__} does not take {names}"


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward takes an argument by keyword."""
    parameters = inspect.signature(model.forward).parameters
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
