"""Meshwright: distributed training on PyTorch that plans itself, recovers exactly, explains itself and proves it.

- train: train a model on one or many ranks, and resume exactly
- plan: search for the fastest layout of a model on a cluster
- simulate: count communication and memory of a step on any number of ranks
- preflight: check the hosts of a job before its first step
- prove: check the contracts of a config on this machine
- RunConfig: the settings of a run
- report: compare what a run measured with what was predicted
- sample: generate text from a checkpoint
- Result: what train returns
- Sample: what sample returns for a prompt
- ParallelSpec: how to parallelize a model of your own
- Callback: receives the records of a run
- callbacks: the callbacks that Meshwright brings
- errors: the exceptions
- testing: run a function on several ranks, in your own tests
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshwright.version import __version__

__all__ = [
    "Callback",
    "ParallelSpec",
    "Result",
    "RunConfig",
    "Sample",
    "__version__",
    "callbacks",
    "errors",
    "plan",
    "preflight",
    "prove",
    "report",
    "sample",
    "simulate",
    "testing",
    "train",
]

if TYPE_CHECKING:
    from meshwright import callbacks, errors, testing
    from meshwright.base.config import RunConfig
    from meshwright.core.api import Result, Sample, sample, train
    from meshwright.core.parallel.parallel_spec import ParallelSpec
    from meshwright.core.trainer.callbacks.callback import Callback
    from meshwright.insight.api import report
    from meshwright.ops.preflight.api import preflight
    from meshwright.planner.api import plan
    from meshwright.prover.api import prove, simulate

_MODULES = {
    "Callback": "meshwright.core.trainer.callbacks.callback",
    "ParallelSpec": "meshwright.core.parallel.parallel_spec",
    "Result": "meshwright.core.api",
    "RunConfig": "meshwright.base.config",
    "Sample": "meshwright.core.api",
    "plan": "meshwright.planner.api",
    "preflight": "meshwright.ops.preflight.api",
    "prove": "meshwright.prover.api",
    "report": "meshwright.insight.api",
    "sample": "meshwright.core.api",
    "simulate": "meshwright.prover.api",
    "train": "meshwright.core.api",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that `import meshwright` is fast and does not import torch."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name in ("callbacks", "errors", "testing"):
        return importlib.import_module(f"meshwright.{name}")
    raise AttributeError(f"module 'meshwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
