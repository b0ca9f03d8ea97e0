"""Runs many proof runs per launch: every rank trains all cases one after the other, so that ranks start only once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from meshwright import faults
from meshwright.config import load_config
from meshwright.launch.ranks import run_ranks
from meshwright.prover.claims import fault_environment
from meshwright.prover.compare.noise import Tolerances
from meshwright.prover.reference import compute_references
from meshwright.prover.shrink import proof_runs
from meshwright.prover.trace import Trace
from meshwright.prover.tracer import RankTrace, assemble
from meshwright.prover.training import TracedRun, describe_comparison, prepare
from meshwright.trainer.loop import train_rank

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


def prepared(options: tuple[str, ...], name: str, folder: Path) -> TracedRun:
    config = load_config(overrides=[*SMALL, *options])
    run = next(run for run in proof_runs(config) if run.name == name)
    return prepare(config, run, folder)


@cache
def reference(options: tuple[str, ...], name: str) -> tuple[Trace, Tolerances]:
    """The reference of a proof run, computed once for all of its faults in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        task = prepared(options, name, Path(folder)).task
        [[result]] = run_ranks(compute_references, 1, [task])
    return result


def train_cases(world, cases: list[Case], folder: Path) -> list[RankTrace | str]:
    """On every rank, the trace of every case, or the error with which it ended."""
    results: list[RankTrace | str] = []
    for number, case in enumerate(cases):
        traced = case.prepare(folder / str(number))
        traced.job.folder.attempt(1).mkdir(parents=True, exist_ok=True)
        job = replace(traced.job, attempt=1)
        with pytest.MonkeyPatch.context() as patch, fault_environment(traced.faults):
            if case.inject is not None:
                case.inject(patch)
            try:
                train_rank(job, world)
                results.append(job.observer.trace)
            except Exception as error:  # noqa: BLE001  every rank fails at the same place, or the launch times out
                results.append(f"{type(error).__name__}: {error}")
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
        traces = [of_rank[number] for of_rank in by_rank]
        if errors := [trace for trace in traces if isinstance(trace, str)]:
            checked.append((False, f"the run failed: {errors[0]}"))
            continue
        exact, tolerances = reference(case.options, case.run)
        checked.append(describe_comparison(traced, assemble(traces, traced.job.layout), exact, tolerances))
    return checked
