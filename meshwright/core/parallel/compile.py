"""torch.compile of blocks or of the whole model, the folder of compiled code, and the check for a C++ compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import sys

import torch
from torch import nn

from meshwright.base.config import RunConfig
from meshwright.base.environment import user_folders
from meshwright.base.io import meshwright_home
from meshwright.core.parallel.parallel_spec import ParallelSpec, find_blocks
from meshwright.core.parallel.world import device_type
from meshwright.core.torch_private import (
    default_compile_cache,
    hide_user_folders_from_inductor,
    inductor_with_memory_budget,
    set_recompile_limit,
    split_graphs_at_buckets,
)
from meshwright.errors import ConfigError

RECOMPILE_LIMIT = 32
"""Graphs per function, after which torch runs it eagerly: training and evaluation, each with a few kinds of blocks."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def apply_compile(
    model: nn.Module, spec: ParallelSpec, scope: str | None = None, memory_budget: float | None = None
) -> None:
    """Compiles the forward of each block by itself, so that equal blocks share one graph. With `scope` = model, it then
    compiles the whole model, into which torch inlines the blocks. `memory_budget` is the fraction of its activation
    memory that a graph keeps for backward.
    """
    set_recompile_limit(RECOMPILE_LIMIT)
    split_graphs_at_buckets(scope == "model")
    use_compile_cache()
    hide_user_folders_from_inductor(user_folders())
    backend = "inductor" if memory_budget is None else inductor_with_memory_budget(memory_budget)
    for block in find_blocks(model, spec):
        block.forward = torch.compile(block.forward, backend=backend)
    if scope == "model":
        compile_whole(model, memory_budget)


def compile_whole(model: nn.Module, memory_budget: float | None = None) -> None:
    """Compiles the forward of the whole model."""
    backend = "inductor" if memory_budget is None else inductor_with_memory_budget(memory_budget)
    model.forward = torch.compile(model.forward, backend=backend)


def use_compile_cache() -> None:
    """Keeps compiled code in the user's own folder, where a restarted run finds it, unless TORCHINDUCTOR_CACHE_DIR is
    set. The cache contains code that torch executes: a run folder may come from somebody else, and in the folder for
    temporary files another user may create the cache first.
    """
    if os.environ.get(CACHE_VARIABLE, "") not in ("", default_compile_cache()):  # imports of torch set the default
        return
    folder = meshwright_home() / "compile"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return
        folder.chmod(0o700)
    except OSError:  # a home that cannot be written: torch's own folder
        return
    os.environ[CACHE_VARIABLE] = str(folder)


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
