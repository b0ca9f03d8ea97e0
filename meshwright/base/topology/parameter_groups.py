"""Groups of parameters by patterns of their names: which group a parameter has, and validation. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from meshwright.base.config import OptimizerConfig, ParameterGroupConfig
from meshwright.errors import ConfigError

SUGGESTIONS = 3
"""Names that an error shows for a pattern that matches nothing."""


def find_group(config: OptimizerConfig, name: str) -> ParameterGroupConfig | None:
    """The first group whose pattern matches the name of a parameter."""
    return next((group for group in config.groups if fnmatchcase(name, group.pattern)), None)


def is_frozen(config: OptimizerConfig, name: str) -> bool:
    group = find_group(config, name)
    return group is not None and group.frozen


def validate_groups(config: OptimizerConfig, names: Sequence[str]) -> None:
    """Raises a ConfigError for a group without a parameter, and if no parameter is left to train. `names` are those of
    all parameters of the model that require a gradient.
    """
    groups = [find_group(config, name) for name in names]
    for index, group in enumerate(config.groups):
        if any(found is group for found in groups):
            continue
        where = f"optimizer.groups[{index}].pattern = {group.pattern!r}"
        if any(fnmatchcase(name, group.pattern) for name in names):
            raise ConfigError(
                f"{where} matches only parameters of earlier groups", "try to move it before them, or to remove it"
            )
        near = difflib.get_close_matches(group.pattern, names, n=SUGGESTIONS, cutoff=0.0)
        raise ConfigError(
            f"{where} matches no parameter of the model that is trained",
            f"expected a pattern of names such as {', '.join(near)}",
        )
    if groups and all(group is not None and group.frozen for group in groups):
        raise ConfigError(
            "optimizer.groups freezes every parameter of the model", "expected at least one parameter to train"
        )
