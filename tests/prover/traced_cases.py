"""Runs many proof runs per launch: every rank trains all cases one after the other, so that ranks start only once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from meshwright.base.topology.layout import Layout
from meshwright.core import faults
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.trainer.loop import train_rank
from meshwright.errors import MeshwrightError
from meshwright.prover.claims import fault_environment
from meshwright.prover.reference import Reference, ReferenceTask, compute_references
from meshwright.prover.shrink import proof_runs
from meshwright.prover.tracer import AssembledTrace, RankTrace, assemble, common_steps
from meshwright.prover.training import TracedRun, describe_comparison, describe_failure, prepare
from tests.kit.small_run import load_cpu_config

AS_CONFIGURED, FLOAT64, VARIATION, LONG_SEQUENCE = "as configured", "float64", "variation", "long sequence"
SMALL = ("--data.kind=synthetic", "--data.samples=400", "--data.sequence=16", "--model.layers=2")


@dataclass(frozen=True)
class Case:
    """A proof run of a config, with a fault."""

    options: tuple[str, ...]
    """The command-line options of the user's config, in addition to SMALL."""
    run: str = VARIATION
    """The name of the proof run."""
    inject: Callable[[pytest.MonkeyPatch], None] | None = None
    """Injects a fault into the ranks before they train."""

    def prepare(self, folder: Path) -> TracedRun:
        return prepared(self.options, self.run, folder)

    @property
    def ranks(self) -> int:
        run = next(
            run for run in proof_runs(load_cpu_config(overrides=[*SMALL, *self.options])) if run.name == self.run
        )
        return Layout.from_config(run.config.layout).ranks


def prepared(options: tuple[str, ...], name: str, folder: Path) -> TracedRun:
    config = load_cpu_config(overrides=[*SMALL, *options])
    run = next(run for run in proof_runs(config) if run.name == name)
    return prepare(config, run, folder)


@cache
def free_reference(options: tuple[str, ...], name: str) -> Reference:
    """The reference of a run in float64, computed once for all of its faults."""
    with tempfile.TemporaryDirectory() as folder:
        return compute_reference(prepared(options, name, Path(folder)).task, None)


def compute_reference(task: ReferenceTask, measured: AssembledTrace | None) -> Reference:
    """The reference, computed in a process of its own."""
    [[result]] = run_ranks(compute_references, 1, [task], [measured])
    return result


def train_cases(world, cases: list[Case], folder: Path) -> list[tuple[RankTrace | None, str]]:
    """On every rank, the trace of every case, and the error with which it ended, or ''."""
    results: list[tuple[RankTrace | None, str]] = []
    for number, case in enumerate(cases):
        traced = case.prepare(folder / str(number))
        traced.job.folder.attempt(1).mkdir(parents=True, exist_ok=True)
        job = replace(traced.job, attempt=1)
        with pytest.MonkeyPatch.context() as patch, fault_environment(traced.faults):
            if case.inject is not None:
                case.inject(patch)
            try:
                train_rank(job, world)
                results.append((job.observer.trace, ""))
            except Exception as error:  # noqa: BLE001  every rank fails at the same place, or the launch times out
                results.append((getattr(job.observer, "trace", None), f"{type(error).__name__}: {error}"))
            finally:
                faults.ARMED_FAULTS.clear()
    return results


def check_cases(cases: list[Case]) -> list[tuple[bool, str]]:
    """For every case, (passed, measured) as `prove` gives it. All cases have the same number of ranks."""
    with tempfile.TemporaryDirectory(prefix="meshwright-cases-") as base:
        runs = [case.prepare(Path(base) / "parent") for case in cases]
        [ranks] = {traced.job.layout.ranks for traced in runs}
        launch = replace(runs[0].job.config.launch, device="cpu")
        by_rank = run_ranks(train_cases, ranks, cases, Path(base), launch=launch, timeout=220.0)
    checked = []
    for number, (case, traced) in enumerate(zip(cases, runs, strict=True)):
        traces = [of_rank[number][0] for of_rank in by_rank]
        errors = [of_rank[number][1] for of_rank in by_rank if of_rank[number][1]]
        recorded = common_steps(traces) if errors and all(traces) else traces
        measured = assemble(recorded, traced.job.layout) if all(traces) and recorded[0].steps else None
        reference = None
        if not traced.task.follows_run:
            reference = free_reference(case.options, case.run)
        elif measured is not None:
            reference = compute_reference(traced.task, measured)
        if errors:
            checked.append((False, describe_failure(traced, MeshwrightError(errors[0]), measured, reference)))
        else:
            checked.append(describe_comparison(traced, measured, reference))
    return checked


def failed_runs(options: tuple[str, ...]) -> list[str]:
    """The proof runs of a config that differ from the reference, except for those that resume a run."""
    runs = [run for run in proof_runs(load_cpu_config(overrides=[*SMALL, *options])) if run.resume_layout is None]
    cases = [Case(options, run.name) for run in runs]
    failed = []
    for ranks in sorted({case.ranks for case in cases}):
        of_size = [case for case in cases if case.ranks == ranks]
        for case, (passed, measured) in zip(of_size, check_cases(of_size), strict=True):
            failed += [] if passed else [f"{case.run}: {measured}"]
    return failed


def long_unless(quick: bool) -> list[pytest.MarkDecorator]:
    """A launch for few faults is left to the long run."""
    return [] if quick else [pytest.mark.long]
