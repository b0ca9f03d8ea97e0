"""Proves many custom models per launch: every rank trains all cases one after the other, so that ranks start once."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.base.config import BatchConfig, EvalConfig, LaunchConfig, LayoutConfig, RunConfig
from meshwright.base.config.device_defaults import with_device_defaults
from meshwright.core import faults
from meshwright.core.data.source import IndexableSource, find_structure
from meshwright.core.launch.ranks import run_ranks
from meshwright.core.parallel.infer_spec import infer_parallel_spec
from meshwright.core.parallel.parallel_spec import ParallelSpec
from meshwright.core.trainer.custom_model import CustomModel
from meshwright.core.trainer.loop import train_rank
from meshwright.errors import MeshwrightError
from meshwright.prover.claims import fault_environment
from meshwright.prover.custom.model_facts import ModelFacts, collect_facts
from meshwright.prover.custom.subject import Subject
from meshwright.prover.custom.training import prepare_custom
from meshwright.prover.reference import compute_references
from meshwright.prover.shrink.custom_runs import custom_runs
from meshwright.prover.tracer import assemble, common_steps
from meshwright.prover.training import TracedRun, describe_comparison, describe_failure
from tests.prover.custom_models import TokenSource

FLOAT64 = "float64"


@dataclass(frozen=True)
class CustomCase:
    """A model of a user, its loss, its data and its layout."""

    module: Any
    loss: Any
    layout: LayoutConfig
    source: Any = field(default_factory=TokenSource)
    spec: ParallelSpec | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """more fields of CustomModel"""

    def subject(self) -> Subject:
        source = IndexableSource(self.source, collate=self.options.get("collate"))
        spec = infer_parallel_spec(self.module, self.spec)
        custom = CustomModel(self.module, self.loss, spec, **self.options)
        return Subject(replace(custom, batch=find_structure(source, custom.collate)), [source])

    def config(self) -> RunConfig:
        config = RunConfig(
            steps=3,
            layout=self.layout,
            batch=BatchConfig(global_=8, micro=2),
            eval=EvalConfig(every=2, holdout=0.2, samples=5),
            launch=LaunchConfig(device="cpu", collective_timeout=20.0),
        )
        return with_device_defaults(config, "cpu")

    def prepare(self, facts: ModelFacts, folder: Path) -> TracedRun:
        run = next(run for run in custom_runs(self.config(), float64=True) if run.name == FLOAT64)
        return prepare_custom(run, self.subject(), facts, folder)


def collect_all_facts(world, subjects: list[Subject]) -> list[ModelFacts | str]:
    facts: list[ModelFacts | str] = []
    for subject in subjects:
        try:
            facts.append(collect_facts(world, subject.custom, subject.sources))
        except MeshwrightError as error:
            facts.append(str(error))
    return facts


def train_all(world, runs: list[TracedRun | None]) -> list[Any]:
    """On every rank, the trace of every run, and the error with which it ended, or ''."""
    results: list[Any] = []
    for traced in runs:
        if traced is None:
            results.append((None, ""))
            continue
        traced.job.folder.attempt(1).mkdir(parents=True, exist_ok=True)
        job = replace(traced.job, attempt=1)
        with fault_environment(traced.faults):
            try:
                train_rank(job, world)
                results.append((job.observer.trace, ""))
            except Exception as error:  # noqa: BLE001  every rank fails at the same place, or the launch times out
                results.append((getattr(job.observer, "trace", None), f"{type(error).__name__}: {error}"))
            finally:
                faults.ARMED_FAULTS.clear()
    return results


def prove_cases(cases: list[CustomCase]) -> list[tuple[bool, str]]:
    """For every case, (passed, measured): the first claim about the plain module that fails, or the comparison."""
    launch = LaunchConfig(device="cpu", collective_timeout=20.0)
    [all_facts] = run_ranks(collect_all_facts, 1, [case.subject() for case in cases], launch=launch, timeout=120.0)
    results: list[tuple[bool, str] | None] = []
    with tempfile.TemporaryDirectory(prefix="meshwright-cases-") as base:
        runs: list[TracedRun | None] = []
        for number, (case, facts) in enumerate(zip(cases, all_facts, strict=True)):
            wrong = [facts] if isinstance(facts, str) else [c.measured for c in facts.claims() if not c.passed]
            results.append((False, wrong[0]) if wrong else None)
            runs.append(None if wrong else case.prepare(facts, Path(base) / str(number)))
        [ranks] = {case.prepare(ModelFacts(""), Path(base)).job.layout.ranks for case in cases}
        by_rank = run_ranks(train_all, ranks, runs, launch=launch, timeout=220.0)
    outcomes: dict[int, Any] = {}
    for number, traced in enumerate(runs):
        if traced is None:
            continue
        traces = [of_rank[number][0] for of_rank in by_rank]
        errors = [of_rank[number][1] for of_rank in by_rank if of_rank[number][1]]
        recorded = common_steps(traces) if errors and all(traces) else traces
        measured = assemble(recorded, traced.job.layout) if all(traces) and recorded[0].steps else None
        outcomes[number] = measured, errors
    complete = {number: measured for number, (measured, _) in outcomes.items() if measured is not None}
    tasks = [runs[number].task for number in complete]
    [computed] = run_ranks(compute_references, 1, tasks, list(complete.values()), launch=launch, timeout=120.0)
    references = dict(zip(complete, computed, strict=True))
    for number, (measured, errors) in outcomes.items():
        traced, reference = runs[number], references.get(number)
        if errors:
            failure = describe_failure(traced, MeshwrightError(errors[0]), measured, reference)
            results[number] = (False, failure)
        else:
            results[number] = describe_comparison(traced, measured, reference)
    return results
