"""What the checks have in common: the claim that a check yields, and how it runs a job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.base.block_sizes import BlockSizes
from meshwright.base.config import LaunchConfig, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.scratch_folder import ScratchFolder
from meshwright.base.topology.layout import stages_per_rank
from meshwright.base.topology.unsupported import validate
from meshwright.core.data.source import Source
from meshwright.core.launch.job import start_ranks
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.compile import require_compiler
from meshwright.core.parallel.world import World, device_type
from meshwright.core.recover.running_ranks import RunningRanks
from meshwright.core.recover.supervisor import supervise
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.job import Job, TrainingObserver

SMALL_BLOCKS = BlockSizes(loader_positions=7, io_bytes=512, digest_bytes=5 << 11)
"""Blocks so small that a small run has several of each, and that no tensor and no file ends where a block does."""


class Claim(NamedTuple):
    """A claim, whether it holds, and what was measured."""

    claim: str
    passed: bool
    measured: str
    changes: tuple[str, ...] = ()
    """The settings of the run that was checked which differ from the user's."""
    not_proven: tuple[str, ...] = ()
    """What the claim leaves open."""
    check: str = ""
    """The name of the check, if it is not that of the function that yields the claim."""


def describe_settings(config: RunConfig) -> str:
    """The settings that the degrees of a layout do not show, in parentheses."""
    settings: list[str] = [f"sharded {config.layout.shard}"] if config.layout.shard != "none" else []
    if config.layout.pipeline > 1:
        stages = stages_per_rank(config)
        settings.append(config.pipeline.schedule + (f", {stages} stages per rank" if stages > 1 else ""))
    if config.layout.context > 1:
        settings.append(f"context parallelism by {config.context.method}")
    if config.activation_checkpoint.mode != "none":
        segment = config.activation_checkpoint.segment
        blocks = f" in segments of {segment} blocks" if segment > 1 else ""
        settings.append(f"activation checkpointing {config.activation_checkpoint.mode}{blocks}")
    settings += ["float8"] if config.precision.float8 else []
    settings += ["compiled"] if config.compile.enabled else []
    settings += ["optimizer state on CPU"] if config.optimizer.cpu_offload else []
    return f" ({', '.join(settings)})" if settings else ""


@cache
def cuda_devices(launch: LaunchConfig) -> int:
    """The number of CUDA devices of this machine that a job uses. A process of its own counts them: CUDA in the
    launcher would not survive the fork of ranks.
    """
    if launch.device == "cpu" or torch.version.cuda is None:
        return 0
    [devices] = run_ranks(count_devices, 1, launch=replace(launch, device="cpu"))
    return int(devices)


def count_devices(_world: World) -> int:
    return torch.cuda.device_count()


def proof_job(
    config: RunConfig,
    sources: list[Source],
    folder: RunFolder,
    observer: TrainingObserver,
    custom: CustomModel | None = None,
) -> Job:
    """The job of a proof run: that of `meshwright train`, with small blocks and an observer."""
    config = with_device_defaults(config, device_type(config.launch), custom is not None)
    layout, batch = validate(config, own_model=custom is not None)
    require_compiler(config)
    return Job(config, batch, layout, sources, folder, custom=custom, block_sizes=SMALL_BLOCKS, observer=observer)


@contextmanager
def proof_folder() -> Iterator[Path]:
    """A temporary folder. If this process is killed, the next launch removes it."""
    folder = ScratchFolder()
    try:
        yield folder.path
    finally:
        folder.remove()


def supervise_quietly(job: Job) -> Any:
    """Runs a job to its end as `meshwright train` does, without output; returns its summary."""

    def start(attempt: int, restart: int) -> RunningRanks:
        return start_ranks(job.as_attempt(attempt, restart, fork=False))

    return supervise(
        job.folder,
        job.config.launch,
        start,
        lambda _attempt: NullViewer(),
        report=lambda _text: None,
        raise_on_signal=True,
    )


@contextmanager
def fault_environment(faults: str) -> Iterator[None]:
    """Injects these faults into the ranks that are started inside."""
    previous = os.environ.get("MESHWRIGHT_FAULT")
    os.environ["MESHWRIGHT_FAULT"] = faults
    try:
        yield
    finally:
        if previous is None:
            del os.environ["MESHWRIGHT_FAULT"]
        else:
            os.environ["MESHWRIGHT_FAULT"] = previous


class NullViewer:
    """A viewer that shows nothing."""

    def tick(self) -> None:
        pass

    def show(self, event: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
