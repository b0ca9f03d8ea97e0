"""Checks the runs of `cases.py`: the ranks of a launch train one run after the other, because a process starts CUDA in
seconds.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from meshwright.base.config import RunConfig
from meshwright.base.records.failures import RanksFailed
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job
from meshwright.core.trainer.loop import train_rank
from meshwright.errors import ConfigError, MeshwrightError
from meshwright.prover.claims import Claim, cuda_devices, proof_folder
from meshwright.prover.device.cases import RANKS, device_runs, unsupported_axes
from meshwright.prover.reference import Reference, ReferenceTask, compute_references
from meshwright.prover.tracer import AssembledTrace
from meshwright.prover.training import MAX_SECONDS, Outcome, TracedRun, compare_with_reference, prepare

SECONDS_PER_RUN = 60.0
"""After so many seconds per run, a launch has failed."""
MAX_REFERENCES_AT_ONCE = 8
DEVICE_AXES = "every axis by itself on CUDA: it needs a built-in model with an independent reference"
"""What a proof with `--device cuda` leaves open for a model without one."""


def check_device(config: RunConfig) -> Iterator[Claim]:
    """Every axis on two and on four ranks, which share devices if there are fewer, in every precision, compiled and
    not: the training loop equals the reference.
    """
    require_device(config)
    for ranks in RANKS:
        yield from check_ranks(config, ranks)
    for axis in unsupported_axes(config):
        yield Claim(f"on CUDA: {axis}", True, "the model does not support it", not_proven=(f"{axis} on CUDA",))


def require_device(config: RunConfig) -> None:
    if not cuda_devices(replace(config.launch, device="cuda")):
        raise ConfigError("--device cuda, but torch finds no CUDA device", "try a machine with a GPU, or no --device")


def check_ranks(config: RunConfig, ranks: int) -> Iterator[Claim]:
    """The runs on this number of ranks."""
    with proof_folder() as base:
        runs = [prepare(config, run, base / str(index)) for index, run in enumerate(device_runs(config, ranks))]
        for traced in runs:
            traced.job.folder.root.mkdir()
        outcomes = train_in_turn(runs)
        references = follow_runs(runs, outcomes)
        for traced, outcome, reference in zip(runs, outcomes, references, strict=True):
            measured = traced.recorded() if isinstance(outcome, MeshwrightError) else outcome
            yield compare_with_reference(traced, outcome, measured, reference)


def train_in_turn(runs: Sequence[TracedRun]) -> list[Outcome]:
    """Trains the runs in one launch. A run that fails ends the launch, and the next one continues after it."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(runs):
        remaining = runs[len(outcomes) :]
        jobs = [traced.job.as_attempt(1, 0, fork=False) for traced in remaining]
        failure: RanksFailed | None = None
        try:
            launch, timeout = jobs[0].config.launch, SECONDS_PER_RUN * len(jobs)
            run_ranks(train_jobs, jobs[0].layout.ranks, jobs, launch=launch, timeout=timeout)
        except RanksFailed as error:
            if error.exit_code > 128:
                raise
            failure = error
        for traced in remaining:
            if not all(completion_mark(traced.job, rank).exists() for rank in range(traced.job.layout.ranks)):
                assert failure is not None
                outcomes.append(failure)
                break
            measured = traced.recorded()
            assert measured is not None
            outcomes.append(measured)
    return outcomes


def train_jobs(world: World, jobs: Sequence[Job]) -> None:
    """Trains as `meshwright train` does, one job after the other, on one rank."""
    for job in jobs:
        train_rank(job, world)
        completion_mark(job, world.rank).touch()
        torch.compiler.reset()
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()


def completion_mark(job: Job, rank: int) -> Path:
    """The file that says that a rank has completed a job of its launch."""
    return job.folder.root / f"complete-{rank}"


def follow_runs(runs: Sequence[TracedRun], outcomes: Sequence[Outcome]) -> list[Reference | None]:
    """The references of the runs, on several cores. None for a run that failed."""
    complete = [(t.task, o) for t, o in zip(runs, outcomes, strict=True) if isinstance(o, AssembledTrace)]
    workers = min(len(complete), os.cpu_count() or 1, MAX_REFERENCES_AT_ONCE)
    if not workers:
        return [None] * len(runs)
    launch = replace(runs[0].job.config.launch, device="cpu")
    computed = run_ranks(compute_share, workers, complete, launch=launch, timeout=MAX_SECONDS)
    references = [computed[index % workers][index // workers] for index in range(len(complete))]
    return [references.pop(0) if isinstance(outcome, AssembledTrace) else None for outcome in outcomes]


def compute_share(world: World, complete: Sequence[tuple[ReferenceTask, AssembledTrace]]) -> list[Reference]:
    """Every n-th reference, by one of n processes."""
    share = complete[world.rank :: world.size]
    return compute_references(world, [task for task, _ in share], [trace for _, trace in share])
