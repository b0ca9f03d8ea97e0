"""The checkpoint suffices: a resumed run equals an uninterrupted one, and no entry has a silent default."""

from __future__ import annotations

from meshwright_practice.checks import Check
from meshwright_practice.interview.evidence import RunEvidence
from meshwright_practice.interview.rank.probes import DIFFERS, FAILS, largest_difference
from meshwright_practice.interview.runner import ProbeFailed

TOLERANCE = 1e-10
"""of float64; both runs sum in the same order"""


def state_keys(evidence: RunEvidence) -> str:
    try:
        keys = evidence.restarts["keys"]
    except ProbeFailed:
        return "unknown"
    return ", ".join(keys) if keys else "none"


def restart_state(evidence: RunEvidence) -> Check:
    """The parameters after a resume equal those without the kill."""
    difference = largest_difference(evidence.resumed.final, evidence.uninterrupted[0].final)
    expected = f"the parameters of the uninterrupted run, within {TOLERANCE:g}"
    keys = state_keys(evidence)
    found = f"a largest difference of {difference:.3g}; the checkpoint has: {keys}"
    message = ""
    if difference > TOLERANCE:
        has_optimizer = "optim" in keys.lower()
        message = (
            "Something that the next step depends on is not restored: optimizer, scheduler, step, or the random state "
            "of each rank."
            if has_optimizer
            else "Weights alone do not restart a run: the optimizer state is not in the checkpoint."
        )
    return Check("restart_state", not message, expected, found, message)


def restart_manifest(evidence: RunEvidence) -> Check:
    """Drop-one test: without an entry of the state, a resume is refused, or it did not need the entry."""
    expected = "a resume without an entry of the state is refused, or gives the same parameters"
    try:
        restarts = evidence.restarts
    except ProbeFailed as failed:
        return Check("restart_manifest", False, expected, str(failed), "Resume must work on one rank as well.")
    if restarts["keys"] is None:
        return Check(
            "restart_manifest", False, expected, "no save", "train must call save(path, state) on one rank too."
        )
    silent = [key for key, outcome in restarts["without"].items() if outcome == DIFFERS]
    refused = [key for key, outcome in restarts["without"].items() if outcome == FAILS]
    found = (
        f"silently other parameters without {', '.join(silent)}"
        if silent
        else f"refused without {', '.join(refused) or 'none'}"
    )
    message = "" if not silent else "Read every entry with state[key], so that an incomplete checkpoint is refused."
    return Check("restart_manifest", not silent, expected, found, message)


def config_identity(evidence: RunEvidence) -> Check:
    """A resume with another config is refused."""
    expected = "a resume with another lr or num_samples is refused"
    accepted = [change for change, outcome in evidence.restarts["others"] if outcome != FAILS]
    changes = "; ".join(f"{key} = {value}" for change in accepted for key, value in change.items())
    message = (
        "" if not accepted else "Save the settings that change the numbers, and compare them before the first step."
    )
    return Check("config_identity", not accepted, expected, f"accepted: {changes}" if accepted else "refused", message)
