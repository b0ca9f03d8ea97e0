"""One process trains: it takes the steps, its loss falls, and two equal runs are equal."""

from __future__ import annotations

from math import isfinite

from meshwright_practice.checks import Check
from meshwright_practice.interview.evidence import RunEvidence
from meshwright_practice.interview.rank.probes import LOSS_STEPS
from meshwright_practice.interview.runner import ProbeFailed

EPOCH = LOSS_STEPS["num_samples"] // (LOSS_STEPS["micro_batch"] * LOSS_STEPS["accumulation"])


def single_run(evidence: RunEvidence) -> Check:
    """`train` ends on one rank, through the functions of the contract."""
    steps = LOSS_STEPS["steps"]
    expected = f"{steps} optimizer steps on one rank, with one loss each"
    try:
        trace = evidence.single[0]
    except ProbeFailed as failed:
        return Check("single_run", False, expected, str(failed), "Nothing else is checked before one process trains.")
    found = f"{len(trace.steps)} steps and {len(trace.losses)} losses"
    message = ""
    if not trace.final:
        message = "train does not call build_model(config), so its model cannot be seen."
    elif not trace.steps:
        message = "No step of a torch.optim optimizer was seen."
    elif not any(step.samples for step in trace.steps):
        message = "train does not call fetch(indices), so the samples that it reads cannot be seen."
    elif len(trace.steps) != steps or len(trace.losses) != steps:
        message = "config['steps'] counts optimizer steps, not backward passes; a loss per optimizer step is returned."
    return Check("single_run", not message, expected, found, message)


def loss_falls(evidence: RunEvidence) -> Check:
    losses = evidence.single[0].losses
    finite = all(map(isfinite, losses))
    first, last = sum(losses[:EPOCH]) / EPOCH, sum(losses[-EPOCH:]) / EPOCH
    found = (
        f"mean loss {first:.4g} in the first epoch, {last:.4g} in the last" if finite else "a loss that is not finite"
    )
    message = (
        "" if finite and last < first else "Check zero_grad, the sign of the loss, and the learning rate of config."
    )
    return Check("loss_falls", not message, "a lower mean loss in the last epoch than in the first", found, message)


def deterministic_run(evidence: RunEvidence) -> Check:
    _, first, second = evidence.single
    differing = sum(one != other for one, other in zip(first, second, strict=False)) + abs(len(first) - len(second))
    found = "equal losses" if not differing else f"{differing} of {len(first)} losses differ"
    message = "" if not differing else "Seed model, data order and dropout from config['seed'] inside train."
    return Check(
        "deterministic_run", not differing, "two runs with the same config have the same losses", found, message
    )
