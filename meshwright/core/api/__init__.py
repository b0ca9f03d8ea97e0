"""The verbs as functions, for scripts, torchrun and notebooks; each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.core.api.generation import sample
    from meshwright.core.api.training import Result, train, train_as_rank, train_with_fork_server
    from meshwright.core.generate.settings import Sample
    from meshwright.ops.engines.kubernetes import launch_kubernetes
    from meshwright.ops.engines.ray_script import launch_ray
    from meshwright.ops.engines.slurm import launch_slurm
    from meshwright.ops.preflight.api import preflight
    from meshwright.planner.api import plan, report, simulate
    from meshwright.prover.api import prove

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
    "Result": "meshwright.core.api.training",
    "Sample": "meshwright.core.generate.settings",
    "launch_kubernetes": "meshwright.ops.engines.kubernetes",
    "launch_ray": "meshwright.ops.engines.ray_script",
    "launch_slurm": "meshwright.ops.engines.slurm",
    "plan": "meshwright.planner.api",
    "preflight": "meshwright.ops.preflight.api",
    "prove": "meshwright.prover.api",
    "report": "meshwright.planner.api",
    "sample": "meshwright.core.api.generation",
    "simulate": "meshwright.planner.api",
    "train": "meshwright.core.api.training",
    "train_as_rank": "meshwright.core.api.training",
    "train_with_fork_server": "meshwright.core.api.training",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
