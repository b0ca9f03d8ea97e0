"""Meshwright: distributed training on PyTorch that plans itself, recovers exactly, explains itself and proves it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshwright.version import __version__

__all__ = ["Parts", "RunConfig", "__version__", "simulate", "train"]

if TYPE_CHECKING:
    from meshwright.api import simulate, train
    from meshwright.config import RunConfig
    from meshwright.parallel.parts import Parts


def __getattr__(name: str) -> Any:
    """Imported on first use: `import meshwright` costs nothing and never imports torch."""
    if name in ("simulate", "train"):
        return importlib.import_module(f"meshwright.{name}")
    if name == "RunConfig":
        return importlib.import_module("meshwright.config").RunConfig
    if name == "Parts":
        return importlib.import_module("meshwright.parallel.parts").Parts
    raise AttributeError(f"module 'meshwright' has no attribute {name!r}")


class CallableRoom(ModuleType):
    """`meshwright.train` is a room and a verb. Python binds the room to that name, so the room can be called."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        verb = getattr(importlib.import_module("meshwright.api"), self.__name__.rpartition(".")[2])
        return verb(*args, **settings)
