"""Checks that the trainer's own loop computes what the user's module does in one plain process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from meshwright.base.config import LayoutConfig, RunConfig
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.topology.layout import Layout
from meshwright.core.launch.ranks import run_ranks
from meshwright.errors import MeshwrightError
from meshwright.prover.claims import Claim, cuda_devices, proof_folder, proof_job
from meshwright.prover.custom.model_facts import ModelFacts
from meshwright.prover.custom.reference import CustomReferenceTask
from meshwright.prover.custom.subject import Subject
from meshwright.prover.reference import Reference, compute_references
from meshwright.prover.shrink.custom_runs import custom_runs
from meshwright.prover.shrink.layouts import small_layout
from meshwright.prover.shrink.runs import ProofRun, changes, place
from meshwright.prover.tracer import AssembledTrace, Tracer
from meshwright.prover.training import (
    MAX_SECONDS,
    NONFINITE_STEP,
    Outcome,
    TracedRun,
    check_resume,
    compare_with_reference,
    execute_or_failure,
)


def check_custom_training(config: RunConfig, subject: Subject, facts: ModelFacts) -> Iterator[Claim]:
    """Trains every proof run and compares it with the plain module. The first run that differs is repeated with one
    axis at a time.
    """
    proofs = custom_runs(config, facts.float64, cuda_devices(config.launch))
    finished: dict[int, tuple[TracedRun, Outcome, Reference | None]] = {}
    explained = False
    with proof_folder() as base:
        for index, run in enumerate(proofs):
            traced = prepare_custom(run, subject, facts, base / str(index))
            if run.resume_layout is not None:
                first, outcome, reference = finished[[p.config for p in proofs].index(run.config)]
                if reference is not None:
                    with subject.unchanged():
                        yield check_resume(traced, first, outcome, reference)
                continue
            claim, outcome, reference = execute_and_compare(traced, subject)
            finished[index] = (traced, outcome, reference)
            if not claim.passed and not explained:
                explained = True
                axes = explain_axes(config, run, subject, facts, base / f"{index}-axes")
                claim = claim._replace(measured="; ".join(filter(None, [claim.measured, axes])))
            yield claim


def prepare_custom(run: ProofRun, subject: Subject, facts: ModelFacts, folder: Path) -> TracedRun:
    """Builds the job of a proof run and the task of its reference."""
    proof = run.config
    job = proof_job(proof, subject.sources, RunFolder(folder), Tracer(folder), subject.custom)
    skips = run.nonfinite or proof.precision.compute == "fp16"
    task = CustomReferenceTask(
        proof,
        subject.sources,
        frozenset({NONFINITE_STEP} if skips and proof.steps > NONFINITE_STEP + 1 else ()),
        replicas=job.batch.replicas,
        custom=subject.custom,
        facts=facts,
        accumulation=job.batch.accumulation,
    )
    return TracedRun(run, task, job)


def execute_and_compare(traced: TracedRun, subject: Subject) -> tuple[Claim, Outcome, Reference | None]:
    """Runs a job and its reference, one after the other, and compares them."""
    with subject.unchanged():
        outcome = execute_or_failure(traced)
    measured = traced.recorded() if isinstance(outcome, MeshwrightError) else outcome
    reference = compute_custom_reference(traced, measured) if measured is not None else None
    return compare_with_reference(traced, outcome, measured, reference), outcome, reference


def compute_custom_reference(traced: TracedRun, measured: AssembledTrace) -> Reference:
    launch = replace(traced.job.config.launch, device="cpu")
    [[reference]] = run_ranks(compute_references, 1, [traced.task], [measured], launch=launch, timeout=MAX_SECONDS)
    return reference  # type: ignore[no-any-return]


def explain_axes(config: RunConfig, run: ProofRun, subject: Subject, facts: ModelFacts, folder: Path) -> str:
    """Repeats a run that differs on one rank and with one axis at a time, and says which of them differ."""
    layout = Layout.from_config(run.config.layout)
    axes = layout.active_mesh_axes
    if not axes:
        return ""
    results = {}
    for axis in ("", *(axes if len(axes) > 1 else ())):
        degrees = {axis: getattr(layout, axis)} if axis else {}
        alone: LayoutConfig = small_layout(run.config.layout, degrees, layout.ranks)
        proof = place(run.config, alone, own_model=True)
        if proof is None:
            continue
        proof_run = replace(run, config=proof, changes=changes(config, proof))
        claim, *_ = execute_and_compare(prepare_custom(proof_run, subject, facts, folder / (axis or "one")), subject)
        results[axis] = claim.passed
        if not axis and not claim.passed:
            return "one rank alone differs too, so no axis is the cause"
    wrong = [axis for axis, passed in results.items() if not passed]
    if len(axes) == 1:
        return f"axis: one rank is right, so the {axes[0]} axis is the cause"
    if wrong:
        right = [axis for axis, passed in results.items() if passed and axis]
        others = f", {' and '.join(right)} alone {'are' if len(right) > 1 else 'is'} right" if right else ""
        return f"axis: {' and '.join(wrong)} alone differs{others}"
    return f"axis: each of {', '.join(axes)} alone is right, so their combination is the cause"
