"""A resumed run continues the sample stream where its checkpoint is: nothing is replayed and nothing is skipped."""

from __future__ import annotations

from meshwright_practice.checks import Check
from meshwright_practice.interview.checks.partition import shown
from meshwright_practice.interview.evidence import KILL_AT, RANKS, STEPS, Resumed, RunEvidence, merged
from meshwright_practice.interview.runner import ProbeFailed


def restart_run(evidence: RunEvidence) -> Check:
    """A run is killed and resumed on two ranks; the uninterrupted one is the reference."""
    expected = f"a run of {STEPS} steps, and one that is killed in step {KILL_AT + 1} and resumed"
    try:
        reference, resumed = evidence.uninterrupted, evidence.resumed
    except ProbeFailed as failed:
        return Check("restart_run", False, expected, str(failed), "train saves after every config['save_every'] steps.")
    steps = len(reference[0].steps)
    found = f"{steps} steps; a checkpoint after step {resumed.saved_step}, then {len(resumed.after)} steps"
    message = "" if steps == STEPS else f"train took {steps} steps, config['steps'] is {STEPS}."
    if not resumed.after and not message:
        message = "The resumed run took no step."
    return Check("restart_run", not message, expected, found, message)


def stream(evidence: RunEvidence) -> list[list[int]]:
    """The samples of each step of the uninterrupted run."""
    return merged([[step.samples for step in trace.steps] for trace in evidence.uninterrupted])


def first_step(reference: list[list[int]], resumed: Resumed) -> int | None:
    """The step of the reference that the resumed run starts with, from 0; None if it is none of them."""
    return next((index for index, batch in enumerate(reference) if batch == resumed.after[0]), None)


def replayed(reference: list[list[int]], resumed: Resumed) -> list[int]:
    """Samples that were trained on before the checkpoint, and that the first resumed step reads again."""
    start = first_step(reference, resumed)
    if start is not None and start >= resumed.saved_step:
        return []
    seen = {sample for batch in reference[: resumed.saved_step] for sample in batch}
    return [sample for sample in resumed.after[0] if sample in seen]


def resume_replay(evidence: RunEvidence) -> Check:
    reference, resumed = stream(evidence), evidence.resumed
    again = replayed(reference, resumed)
    start = first_step(reference, resumed)
    found = (
        "no sample again"
        if not again
        else f"{shown(again)} again" + (f", those of step {start + 1}" if start is not None else "")
    )
    message = "" if not again else "Save the position in the data with the step, and start the epoch from there."
    expected = f"no sample again that was trained on before step {resumed.saved_step + 1}"
    return Check("resume_replay", not again, expected, found, message)


def resume_skip(evidence: RunEvidence) -> Check:
    """The resumed steps read what the uninterrupted run reads in the same steps."""
    reference, resumed = stream(evidence), evidence.resumed
    expected = f"steps {resumed.saved_step + 1} to {STEPS} read what they read without the kill"
    wanted = reference[resumed.saved_step :]
    if resumed.after == wanted:
        return Check("resume_skip", True, expected, "the same samples")
    skipped = sorted({sample for sample in wanted[0] if sample not in resumed.after[0]}) if wanted else []
    found = f"{len(resumed.after)} steps; step {resumed.saved_step + 1} does not read {shown(skipped)}"
    message = "Samples are skipped: the saved position must be that of the checkpoint's step, not of the loader."
    return Check("resume_skip", False, expected, found, message)


def elastic_resume(evidence: RunEvidence) -> Check:
    """A resume on one rank instead of two reads the same samples per step."""
    expected = f"a run of {RANKS} ranks continues on one rank, with the same samples per step"
    try:
        resumed = evidence.elastic
    except ProbeFailed as failed:
        return Check("elastic_resume", False, expected, str(failed), "The position must not depend on the world size.")
    wanted = stream(evidence)[resumed.saved_step :]
    passed = resumed.after == wanted
    found = "the same samples" if passed else f"step {resumed.saved_step + 1} reads {shown(resumed.after[0])}"
    message = "" if passed else "Save a global position, and deal a global order out to the ranks of each step."
    return Check("elastic_resume", passed, expected, found, message)
