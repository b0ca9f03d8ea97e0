"""Checks that the trainer's own loop computes what the independent reference does, on every proof run of a config."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from meshwright.base.checkpoint.listing import list_published, open_run_store
from meshwright.base.config import RunConfig
from meshwright.base.records.failures import RanksFailed
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.launch.ranks import Ranks, run_ranks
from meshwright.core.trainer.job import Job
from meshwright.errors import MeshwrightError
from meshwright.prover.claims import (
    Claim,
    cuda_devices,
    describe_settings,
    fault_environment,
    proof_folder,
    proof_job,
    supervise_quietly,
)
from meshwright.prover.comm_volume import check_communication
from meshwright.prover.compare.causes import NEXT_MOVES, NEXT_MOVES_ON_ONE_RANK, Evidence, likely_cause
from meshwright.prover.compare.custom_causes import NEXT_MOVES_OF_CUSTOM, custom_gradient_cause, explain_conflict
from meshwright.prover.compare.discrepancy import PHASES, Difference, Quantity, compare_traces
from meshwright.prover.compare.updates import updates_by_definition
from meshwright.prover.oracle.optimizer import step_seed
from meshwright.prover.oracle.update_rules import ReferenceOptimizer
from meshwright.prover.reference import (
    Reference,
    ReferenceTask,
    compute_references,
    compute_stale_loss,
    fit_sample_weights,
)
from meshwright.prover.shrink import ProofRun, open_proof_sources, proof_runs
from meshwright.prover.shrink.runs import changes as layout_changes
from meshwright.prover.trace import StepTrace, Trace
from meshwright.prover.tracer import AssembledTrace, Contradiction, Tracer, assemble, read_traces

MAX_SECONDS = 3600.0
"""The longest time that the reference of one run may take."""
NONFINITE_STEP = 1
"""The step whose loss is made NaN in the variation, and in fp16, whose loss scale changes then."""


@dataclass
class TracedRun:
    """A proof run, its reference, and its job."""

    run: ProofRun
    task: ReferenceTask
    job: Job

    @property
    def optimizer(self) -> ReferenceOptimizer:
        """The optimizer by its definition."""
        return ReferenceOptimizer.of_run(self.job.config, self.task.blocks)

    @property
    def faults(self) -> str:
        """A step with a loss that is not finite, and slow writers, so that a save overlaps with the next updates."""
        nonfinite = [f"step.backward:rank0:nan@step{step}" for step in self.task.nonfinite_steps]
        return ",".join([*nonfinite, "save.begin:slow=0.2"])

    def execute(self) -> AssembledTrace:
        """Trains as `meshwright train` does, and returns what the ranks recorded."""
        with fault_environment(self.faults):
            supervise_quietly(self.job)
        measured = self.recorded()
        assert measured is not None
        return measured

    def recorded(self) -> AssembledTrace | None:
        """What the ranks recorded of the steps that all of them completed; None if there is no such step."""
        traces = read_traces(self.job.folder.root, self.job.layout)
        return assemble(traces, self.job.layout) if traces and traces[0].steps else None


Outcome = AssembledTrace | MeshwrightError
"""What a run recorded, or why it failed."""


def check_training(config: RunConfig, full: bool = False) -> Iterator[Claim]:
    """Trains every proof run and compares it with the reference. References that do not depend on a run are computed
    at the same time.
    """
    proofs = proof_runs(config, full, cuda_devices(config.launch))
    launch = replace(config.launch, device="cpu")
    with proof_folder() as base:
        runs = [prepare(config, run, base / str(index)) for index, run in enumerate(proofs)]
        uninterrupted = [traced for traced in runs if traced.run.resume_layout is None]
        tasks = [traced.task for traced in uninterrupted]
        independent = [index for index, task in enumerate(tasks) if not task.follows_run]
        ranks = Ranks(compute_references, 1, ([tasks[i] for i in independent], [None] * len(independent)), launch)
        try:
            outcomes = [execute_or_failure(traced) for traced in uninterrupted]
            deadline = time.monotonic() + MAX_SECONDS
            while not ranks.poll(1.0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the reference had not ended after {MAX_SECONDS:g} s")
        except BaseException:
            ranks.kill()
            raise
        [computed] = ranks.results()
        references: dict[int, Reference] = dict(zip(independent, computed, strict=True))
        for index, (traced, outcome) in enumerate(zip(uninterrupted, outcomes, strict=True)):
            measured = traced.recorded() if isinstance(outcome, MeshwrightError) else outcome
            if index not in references and measured is not None:
                [[references[index]]] = run_ranks(
                    compute_references, 1, [traced.task], [measured], launch=launch, timeout=MAX_SECONDS
                )
            yield compare_with_reference(traced, outcome, measured, references.get(index))
        for traced in runs:
            if traced.run.resume_layout is not None:
                index = [other.run.config for other in uninterrupted].index(traced.run.config)
                yield check_resume(traced, uninterrupted[index], outcomes[index], references[index])
        if not isinstance(outcomes[0], MeshwrightError):
            for claim in check_communication(uninterrupted[0].job, uninterrupted[0].run.changes):
                yield claim._replace(check="communication")


def prepare(config: RunConfig, run: ProofRun, folder: Path) -> TracedRun:
    """Opens the data of a proof run and builds its job."""
    proof = run.config
    sources = open_proof_sources(config, proof, run.masked_labels)
    job = proof_job(proof, sources, RunFolder(folder), Tracer(folder))
    skips = run.nonfinite or proof.precision.compute == "fp16"
    nonfinite_steps = frozenset({NONFINITE_STEP} if skips and proof.steps > NONFINITE_STEP + 1 else ())
    pass_samples = job.batch.micro if proof.model.capacity_factor else None
    task = ReferenceTask(proof, sources, nonfinite_steps, pass_samples, job.batch.replicas, run.first_step)
    return TracedRun(run, task, replace(job, first_step=run.first_step))


def execute_or_failure(traced: TracedRun) -> Outcome:
    """A run that fails is a failed claim; a signal ends the proof."""
    try:
        return traced.execute()
    except MeshwrightError as error:
        if error.exit_code > 128:
            raise
        return error


def check_resume(traced: TracedRun, first: TracedRun, outcome: Outcome, reference: Reference) -> Claim:
    """Continues a finished run from its first checkpoint on another layout: the restored state is bitwise that of the
    first layout, and the following steps equal the reference.
    """
    assert traced.run.resume_layout is not None
    folder = traced.job.folder
    job = proof_job(traced.run.resume_layout, first.job.sources, folder, Tracer(folder.root), first.job.custom)
    resumed = replace(traced, job=job, task=traced.task.on_layout(job.config, job.batch))
    claim = (
        f"{traced.run.name}: a run on {first.job.layout}{describe_settings(first.job.config)} continues on "
        f"{resumed.job.layout}{describe_settings(resumed.job.config)}, {describe_model(first.job)}: the "
        "restored state is bitwise the same, and the following steps equal the reference"
    )
    changes = (*traced.run.changes, *layout_changes(first.job.config, resumed.job.config))
    if isinstance(outcome, MeshwrightError):
        return Claim(claim, False, f"the first run failed: {outcome}", changes)
    shutil.copytree(first.job.folder.root, resumed.job.folder.root)
    done = keep_first_checkpoint(resumed.job.folder)
    if not done:
        return Claim(claim, False, "the first run published no checkpoint", changes)
    continued = execute_or_failure(resumed)
    if isinstance(continued, MeshwrightError):
        return Claim(claim, False, f"the resumed run failed: {continued}", changes)
    before = outcome.trace.steps[done - 1].parameters
    for name, right in (before | outcome.moments[done] | outcome.buffers[done]).items():
        found = (continued.trace.initial | continued.moments[0] | continued.buffers[0]).get(name)
        if found is None or not torch.equal(found, right):
            rank = continued.owner(name, ())
            return Claim(claim, False, f"rank {rank}: {name} is not restored as it was after {done} steps", changes)
    if resumed.task.follows_run:
        launch = replace(job.config.launch, device="cpu")
        [[reference]] = run_ranks(
            compute_references, 1, [resumed.task], [continued], launch=launch, timeout=MAX_SECONDS
        )
        passed, text = describe_comparison(resumed, continued, with_initial(reference, before))
        return Claim(claim, passed, f"from step {done}: {text}", changes)
    exact, tolerances, _ = reference
    evaluations = [evaluation for evaluation in exact.evaluations if evaluation[0] >= done]
    expected = Trace(before, exact.steps[done:], evaluations, exact.moments)
    passed, text = describe_comparison(resumed, continued, (expected, tolerances, None))
    return Claim(claim, passed, f"from step {done}: {text}", changes)


def with_initial(reference: Reference, initial: dict[str, Tensor]) -> Reference:
    """The reference of a run that starts with other parameters."""
    exact, tolerances, states = reference
    return replace(exact, initial=initial), tolerances, states


def keep_first_checkpoint(folder: RunFolder) -> int:
    """Deletes all checkpoints but the first, and returns its number of steps; 0 if there is none."""
    entries = sorted(list_published(open_run_store(folder)), key=lambda entry: entry.step)
    for entry in entries[1:]:
        shutil.rmtree(folder.root / entry.folder)
    return entries[0].step if entries else 0


def compare_with_reference(
    traced: TracedRun, outcome: Outcome, measured: AssembledTrace | None, reference: Reference | None
) -> Claim:
    """The claim that a run equals the reference."""
    run, job = traced.run, traced.job
    settings = [describe_model(job), f"{job.batch.accumulation} micro-batches per step"]
    if job.custom is None:
        settings += ["tied weights"] if job.config.model.tie else []
        settings += ["packed documents"] if job.config.model.separator is not None else []
    claim = (
        f"{run.name}: {job.layout}{describe_settings(job.config)}, {', '.join(settings)}: steps {job.first_step} to "
        f"{job.config.steps - 1} of the training loop equal the reference ({job.config.precision.compute})"
    )
    if isinstance(outcome, MeshwrightError):
        return Claim(claim, False, describe_failure(traced, outcome, measured, reference), run.changes)
    assert reference is not None
    passed, text = describe_comparison(traced, outcome, reference)
    return Claim(claim, passed, text, run.changes, hidden_quantities(run.name, reference))


def describe_model(job: Job) -> str:
    """The class of a custom model; the number of blocks of the built-in one."""
    if job.custom is not None:
        return type(job.custom.module).__qualname__
    return f"{job.config.model.layers} blocks"


def hidden_quantities(name: str, reference: Reference) -> tuple[str, ...]:
    """What rounding hides in a run, as a sentence of the certificate."""
    noisy = reference[1].too_noisy()
    if not noisy:
        return ()
    return (f"{len(noisy)} quantities of the run {name}, whose rounding hides a factor of 1.25, first the {noisy[0]}",)


def describe_failure(
    traced: TracedRun, error: MeshwrightError, measured: AssembledTrace | None, reference: Reference | None
) -> str:
    """Why a run failed, and what is wrong in the steps that its ranks had recorded."""
    failure = f"the run failed: {error}"
    if measured is None or reference is None:
        return failure
    exact, tolerances, states = reference
    steps = exact.steps[: len(measured.trace.steps)]
    evaluations = exact.evaluations[: len(measured.trace.evaluations)]
    begun = Trace(exact.initial, steps, evaluations)
    passed, text = describe_comparison(traced, measured, (begun, tolerances, states))
    return failure if passed else f"{text}; {failure}"


def describe_comparison(traced: TracedRun, measured: AssembledTrace, reference: Reference) -> tuple[bool, str]:
    """Whether the trace of a run equals the reference, and the evidence."""
    exact, tolerances, states = reference
    differences = list(compare_traces(exact, measured.trace, states))
    wrong = [found for found in differences if not tolerances.accepts(found)]
    if any(found.quantity.kind == "update" for found in wrong):
        by_definition = updates_by_definition(traced.job.config, traced.optimizer, measured)
        wrong = [found for found in wrong if found.quantity not in by_definition]
    contradictions = sorted(measured.contradictions, key=computation_order)
    if contradictions and (not wrong or computation_order(contradictions[0]) < computation_order(wrong[0].quantity)):
        found = contradictions[0]
        right = next((step.gradients.get(found.name) for step in exact.steps if step.step == found.step), None)
        cause = explain_conflict(found.name, found.step, measured, right, traced.job.layout)
        text = f"{found.text} ({len(contradictions)} such values)"
        return False, f"{text}: {cause}" if cause else text
    if wrong:
        return False, describe_finding(traced, wrong, exact, measured)
    if seed := wrong_seed(traced.task.config, measured):
        return False, seed
    noisy = set(tolerances.too_noisy())
    proven = [found for found in differences if found.quantity in tolerances.errors and found.quantity not in noisy]
    if not proven:
        return False, "no step computed an update that can be compared"
    largest = max(proven, key=lambda found: found.error)
    kinds = Counter(found.quantity.kind for found in proven)
    return True, (
        f"inputs, seeds, learning rates, {kinds['loss']} losses, {kinds['gradient']} gradients, {kinds['norm']} norms, "
        f"{kinds['update']} updates, {kinds['evaluation']} evaluations: largest relative error {largest.error:.1e} "
        f"({largest.quantity}; rounding explains {tolerances.errors[largest.quantity]:.1e})"
    )


def computation_order(quantity: Quantity | Contradiction) -> tuple[int, int]:
    """When a run computes a quantity."""
    return quantity.step, list(PHASES).index(quantity.kind)


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
    launch = replace(job.config.launch, device="cpu")

    def stale_loss() -> float:
        [loss] = run_ranks(compute_stale_loss, 1, traced.task, launch=launch, timeout=MAX_SECONDS)
        return float(loss)

    def fit_weights(step: StepTrace, before: Mapping[str, Tensor], names: list[str]) -> tuple[Tensor, float]:
        arguments = traced.task, step, dict(before), names, job.batch.accumulation
        [fitted] = run_ranks(fit_sample_weights, 1, *arguments, launch=launch, timeout=MAX_SECONDS)
        return cast("tuple[Tensor, float]", fitted)

    evidence = Evidence(
        job.config, exact, measured, job.layout, job.batch.accumulation, stale_loss, fit_weights, traced.optimizer
    )
    if job.custom is not None:
        evidence = replace(evidence, explain_gradients=custom_gradient_cause, tied=traced.task.tied)
    try:
        cause = likely_cause(wrong, evidence)
    except RanksFailed as error:  # the difference is a finding without its cause, too
        if error.exit_code > 128:
            raise
        cause = f"the cause could not be computed ({error})"
    rank, phase = measured.owner(first.quantity.name, first.element), PHASES[first.quantity.kind]
    size = f"a relative error of {first.error:.1e} (factor {first.factor:.4g})"
    moves = NEXT_MOVES if job.layout.ranks > 1 else NEXT_MOVES | NEXT_MOVES_ON_ONE_RANK
    moves = moves | (NEXT_MOVES_OF_CUSTOM if job.custom is not None else {})
    advice = moves[phase].format(step=max(0, first.quantity.step), rank=rank)
    return (
        f"rank {rank}, phase {phase}: {first.quantity} differs from the reference by {size}: {cause}; "
        f"{len(wrong)} quantities differ; next: {advice}"
    )
