"""Meshwright: distributed training on PyTorch that plans itself, recovers exactly, explains itself and proves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.version import __version__

__all__ = ["RunConfig", "__version__", "train"]

if TYPE_CHECKING:
    from meshwright.api import train
    from meshwright.config import RunConfig


def __getattr__(name: str) -> Any:
    """Imported on first use: `import meshwright` costs nothing and never imports torch."""
    if name == "train":
        from meshwright.api import train

        return train
    if name == "RunConfig":
        from meshwright.config import RunConfig

        return RunConfig
    raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
