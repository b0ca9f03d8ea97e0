"""Meshwright: distributed training on PyTorch that plans itself, recovers exactly, explains itself and proves it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshwright.version import __version__

__all__ = ["ParallelSpec", "RunConfig", "__version__", "simulate", "train"]

if TYPE_CHECKING:
    from meshwright.api import simulate, train
    from meshwright.config import RunConfig
    from meshwright.parallel.parallel_spec import ParallelSpec


def __getattr__(name: str) -> Any:
    """Imported on first use: `import meshwright` costs nothing and never imports torch."""
    if name in ("simulate", "train"):
        return getattr(importlib.import_module("meshwright.api"), name)
    if name == "RunConfig":
        return importlib.import_module("meshwright.config").RunConfig
    if name == "ParallelSpec":
        return importlib.import_module("meshwright.parallel.parallel_spec").ParallelSpec
    raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
