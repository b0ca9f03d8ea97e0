"""torch.compile of each block, and the check that a C++ compiler exists before ranks start."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

import torch
from torch import nn

from meshwright.config import RunConfig
from meshwright.errors import ConfigError
from meshwright.parallel.parallel_spec import ParallelSpec, find_blocks
from meshwright.parallel.world import device_type
from meshwright.torch_private import inductor_with_memory_budget


def apply_compile(model: nn.Module, spec: ParallelSpec, memory_budget: float | None = None) -> None:
    """Compiles the forward of each block by itself, so that equal blocks share one graph. `memory_budget` is the
    fraction of its activation memory that a block keeps for backward.
    """
    backend = "inductor" if memory_budget is None else inductor_with_memory_budget(memory_budget)
    for block in find_blocks(model, spec):
        block.forward = torch.compile(block.forward, backend=backend)


def require_compiler(config: RunConfig) -> None:
    """Raises a ConfigError if blocks are to be compiled on CPU and there is no C++ compiler: TorchInductor would
    fail in the first step, on every rank.
    """
    if not config.compile.enabled or device_type(config.launch) != "cpu":
        return
    command = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as TorchInductor looks it up
    program = shlex.split(command)[0] if command.strip() else command
    if shutil.which(program) is None:
        raise ConfigError(
            f"compile.enabled = true needs a C++ compiler on CPU, and {program or 'CXX'} is not on PATH",
            "try to install g++ (apt install g++), set CXX to a C++ compiler, or set compile.enabled = false",
        )
