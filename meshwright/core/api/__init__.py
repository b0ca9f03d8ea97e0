"""Training and sampling as functions, for scripts, torchrun and notebooks; each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.core.api.generation import sample
    from meshwright.core.api.training import Result, train, train_as_rank, train_with_fork_server
    from meshwright.core.generate.settings import Sample

__all__ = [
    "Result",
    "Sample",
    "sample",
    "train",
    "train_as_rank",
    "train_with_fork_server",
]

_MODULES = {
    "Result": "meshwright.core.api.training",
    "Sample": "meshwright.core.generate.settings",
    "sample": "meshwright.core.api.generation",
    "train": "meshwright.core.api.training",
    "train_as_rank": "meshwright.core.api.training",
    "train_with_fork_server": "meshwright.core.api.training",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
