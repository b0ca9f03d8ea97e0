"""Runs a function with the trainer of every rank, and counts the bytes of a step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from meshwright.base.config import EvalConfig, RunConfig
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.layout import Layout
from meshwright.core.launch.job import make_job
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.world import World
from meshwright.core.trainer.job import Job
from meshwright.core.trainer.loop import Training
from meshwright.core.trainer.records.step_counters import StepCounters, count_step

T = TypeVar("T")


def run_training(measure: Callable[[Training], T], config: RunConfig) -> list[T]:
    """Returns the result of `measure` for the trainer of every rank of a run that counts and evaluates nothing."""
    config = replace(config, count_bytes_every=0, eval=EvalConfig(every=0))
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        job = make_job(config, RunFolder(Path(folder)))
        ranks = Layout.from_config(config.layout).ranks
        results: list[T] = run_ranks(measure_rank, ranks, job, measure, launch=config.launch)
        return results


def measure_rank(world: World, job: Job, measure: Callable[[Training], T]) -> T:
    return measure(Training(job, world))


def count_third_step(training: Training) -> StepCounters:
    """Counts the third step of a run: everything that is allocated once exists by then."""
    while training.done < 2:
        training.run_step()
    with count_step(training.parallel_model, training.optimizer) as counters:
        training.step.run(2, training.resume.learning_rate(2), training.batches, counters.enter)
    training.done = 3
    return counters
