"""The verbs as functions, for scripts, torchrun and notebooks; each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api.generation import sample
    from meshwright.api.host_checks import preflight
    from meshwright.api.prediction import plan, report, simulate
    from meshwright.api.proof import prove
    from meshwright.api.training import Result, train, train_as_rank, train_with_fork_server
    from meshwright.generate.settings import Sample
    from meshwright.launch.engines.kubernetes import launch_kubernetes
    from meshwright.launch.engines.ray_script import launch_ray
    from meshwright.launch.engines.slurm import launch_slurm

__all__ = [
    "Result",
    "Sample",
    "launch_kubernetes",
    "launch_ray",
    "launch_slurm",
    "plan",
    "preflight",
    "prove",
    "report",
    "sample",
    "simulate",
    "train",
    "train_as_rank",
    "train_with_fork_server",
]

_MODULES = {
    "Result": "meshwright.api.training",
    "Sample": "meshwright.generate.settings",
    "launch_kubernetes": "meshwright.launch.engines.kubernetes",
    "launch_ray": "meshwright.launch.engines.ray_script",
    "launch_slurm": "meshwright.launch.engines.slurm",
    "plan": "meshwright.api.prediction",
    "preflight": "meshwright.api.host_checks",
    "prove": "meshwright.api.proof",
    "report": "meshwright.api.prediction",
    "sample": "meshwright.api.generation",
    "simulate": "meshwright.api.prediction",
    "train": "meshwright.api.training",
    "train_as_rank": "meshwright.api.training",
    "train_with_fork_server": "meshwright.api.training",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
