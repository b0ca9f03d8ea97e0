"""Checks that the trainer's own loop computes what the independent reference computes, on every proof run of a config."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.config import BlockSizes, RunConfig
from meshwright.data.source import Source
from meshwright.errors import MeshwrightError
from meshwright.launch.job import start_ranks
from meshwright.launch.ranks import Ranks, run_ranks
from meshwright.parallel.compile import require_compiler
from meshwright.prover.causes import NEXT_MOVES, likely_cause
from meshwright.prover.claims import Claim, describe_settings, fault_environment, supervise_quietly
from meshwright.prover.discrepancy import PHASES, Difference, compare_traces
from meshwright.prover.noise import Tolerances
from meshwright.prover.oracle.optimizer import step_seed
from meshwright.prover.proof_data import proof_sources
from meshwright.prover.reference import ReferenceTask, compute_references, compute_stale_loss
from meshwright.prover.shrink import ProofRun, proof_runs
from meshwright.prover.trace import Trace
from meshwright.prover.tracer import AssembledTrace, Tracer, assemble, read_traces
from meshwright.telemetry.run_folder import RunFolder
from meshwright.topology.unsupported import validate
from meshwright.trainer.loop import Job

SMALL_BLOCKS = BlockSizes(loader_positions=7, io_bytes=512, digest_bytes=4096)
"""Blocks so small that a small run has several of each."""
POISONED_STEP = 1
"""The step of the variation whose loss is made NaN."""


@dataclass
class TracedRun:
    """A proof run, its reference, and what the trainer did."""

    run: ProofRun
    task: ReferenceTask
    job: Job

    @property
    def faults(self) -> str:
        return "".join(f"step.backward:rank0:nan@step{step}" for step in self.task.poisoned)

    def execute(self) -> AssembledTrace:
        """Trains as `meshwright train` does, and returns what the ranks recorded."""
        self.job.folder.root.mkdir(parents=True, exist_ok=True)
        with fault_environment(self.faults):
            supervise_quietly(self.job)
        return assemble(read_traces(self.job.folder.root, self.job.layout), self.job.layout)


def check_training(config: RunConfig, full: bool = False) -> Iterator[Claim]:
    """Trains every proof run and compares it with the reference."""
    with tempfile.TemporaryDirectory(prefix="meshwright-prove-") as base:
        runs = [prepare(config, run, Path(base)) for run in proof_runs(config, full)]
        references = Ranks(compute_references, 1, ([run.task for run in runs],), runs[0].job.config.launch)
        try:
            traces = [execute_or_failure(run) for run in runs]
            while not references.poll(1.0):
                pass
        except BaseException:
            references.kill()
            raise
        [expected] = references.results()
        for traced, measured, (exact, tolerances) in zip(runs, traces, expected, strict=True):
            yield compare_with_reference(traced, measured, exact, tolerances)


def prepare(config: RunConfig, run: ProofRun, base: Path) -> TracedRun:
    """Opens the data of a proof run and builds its job."""
    proof = run.config
    sources = proof_sources(config, proof, run.masked)
    job = proof_job(proof, sources, RunFolder(base / run.name.replace(" ", "-")))
    poisoned = frozenset({POISONED_STEP} if run.masked and proof.steps > POISONED_STEP + 1 else ())
    pass_samples = job.batch.micro if proof.model.capacity_factor else None
    return TracedRun(run, ReferenceTask(proof, sources, poisoned, pass_samples), job)


def proof_job(config: RunConfig, sources: list[Source], folder: RunFolder) -> Job:
    """The job of a proof run: that of `meshwright train`, with small blocks and a tracer."""
    layout, batch = validate(config)
    require_compiler(config)
    config = replace(config, launch=replace(config.launch, restarts=0))
    return Job(config, batch, layout, sources, folder, block_sizes=SMALL_BLOCKS, observer=Tracer(folder.root))


def execute_or_failure(traced: TracedRun) -> AssembledTrace | MeshwrightError:
    """A run that fails is a failed claim; a signal ends the proof."""
    try:
        return traced.execute()
    except MeshwrightError as error:
        if error.exit_code > 128:
            raise
        return error


def compare_with_reference(
    traced: TracedRun, measured: AssembledTrace | MeshwrightError, exact: Trace, tolerances: Tolerances
) -> Claim:
    """The claim that a run equals the reference."""
    run, job, batch = traced.run, traced.job, traced.job.batch
    model = job.config.model
    settings = [f"{model.layers} blocks", f"{batch.accumulation} micro-batches per step"]
    settings += ["tied weights"] if model.tie else []
    settings += ["packed documents"] if model.separator is not None else []
    claim = (
        f"{run.name}: {job.layout}{describe_settings(job.config)}, {', '.join(settings)}: {job.config.steps} steps of "
        f"the training loop equal the reference ({job.config.precision.compute})"
    )
    if isinstance(measured, MeshwrightError):
        return Claim(claim, False, f"the run failed: {measured}", run.changes)
    passed, text = describe_comparison(traced, measured, exact, tolerances)
    return Claim(claim, passed, text, run.changes)


def describe_comparison(
    traced: TracedRun, measured: AssembledTrace, exact: Trace, tolerances: Tolerances
) -> tuple[bool, str]:
    """Whether the trace of a run equals the reference, and the evidence."""
    differences = list(compare_traces(exact, measured.trace))
    wrong = [found for found in differences if not tolerances.accepts(found)]
    if wrong:
        return False, describe_finding(traced, wrong, exact, measured)
    if measured.contradictions:
        return False, f"{measured.contradictions[0]} ({len(measured.contradictions)} such values)"
    if seed := wrong_seed(traced.task.config, measured):
        return False, seed
    largest = max((found for found in differences if tolerances.errors.get(found.quantity)), key=lambda f: f.error)
    noisy = tolerances.too_noisy()
    doubt = f"; rounding hides errors in {len(noisy)} quantities, first {noisy[0]}" if noisy else ""
    steps = exact.steps
    return True, (
        f"inputs, {len(steps)} losses, norms and learning rates, {sum(len(s.gradients) for s in steps)} gradients, "
        f"{sum(len(s.parameters) for s in steps)} updates, {len(exact.evaluations)} evaluations: largest relative error "
        f"{largest.error:.1e} ({largest.quantity}; rounding explains {tolerances.errors[largest.quantity]:.1e}){doubt}"
    )


def wrong_seed(config: RunConfig, measured: AssembledTrace) -> str:
    """The first seed that is not a function of the run's seed, the step and the data coordinate; '' if all are."""
    for step, by_coordinate in zip(measured.trace.steps, measured.seeds, strict=True):
        for coordinate, seeds in by_coordinate.items():
            if seeds != {expected := step_seed(config.seed, step.step, coordinate)}:
                return (
                    f"step {step.step}: the ranks with data coordinate {coordinate} use the random seeds "
                    f"{sorted(seeds)}, expected {expected}"
                )
    return ""


def describe_finding(traced: TracedRun, wrong: list[Difference], exact: Trace, measured: AssembledTrace) -> str:
    """The first difference in the order of computation: what, where, how large, why, and what to do."""
    first, job = wrong[0], traced.job

    def stale_loss() -> float:
        [loss] = run_ranks(compute_stale_loss, 1, traced.task, launch=job.config.launch)
        return float(loss)

    cause = likely_cause(wrong, exact, measured.trace, job.layout, job.batch.accumulation, stale_loss)
    rank, phase = measured.owner(first.quantity.name, first.element), PHASES[first.quantity.kind]
    size = f"a relative error of {first.error:.1e} (factor {first.factor:.4g})"
    next_move = NEXT_MOVES[phase].format(step=max(0, first.quantity.step), rank=rank)
    return (
        f"rank {rank}, phase {phase}: {first.quantity} differs from the reference by {size}: {cause}; "
        f"{len(wrong)} quantities differ; next: {next_move}"
    )
