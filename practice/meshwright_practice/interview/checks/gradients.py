"""Two ranks compute one gradient: it equals that of one process on all samples, and is reduced once per step."""

from __future__ import annotations

import torch

from meshwright.base.io import format_bytes
from meshwright_practice.checks import Check
from meshwright_practice.interview.evidence import RANKS, RunEvidence
from meshwright_practice.interview.exercise import BASE_CONFIG
from meshwright_practice.interview.rank.probes import largest_difference
from meshwright_practice.interview.runner import ProbeFailed

TOLERANCE = 1e-10
"""of float64, relative to the largest entry of the gradient: sums of a few terms in another order"""
MAX_REDUCTIONS = 1.5
"""Reduced bytes per gradient bytes up to which a step counts as synchronized once; a loss may be reduced as well."""


def two_ranks_run(evidence: RunEvidence) -> Check:
    expected = f"3 optimizer steps on each of {RANKS} ranks"
    try:
        traces = evidence.two_ranks
    except ProbeFailed as failed:
        return Check(
            "two_ranks_run", False, expected, str(failed), "The ranks are given in config and in RANK, WORLD_SIZE."
        )
    steps = [len(trace.steps) for trace in traces]
    passed = all(count == 3 for count in steps)
    message = "" if passed else "Every rank takes the same number of steps, or the others wait for it for ever."
    return Check("two_ranks_run", passed, expected, f"steps per rank: {steps}", message)


def gradient_union(evidence: RunEvidence) -> Check:
    """Before each optimizer step, every rank has the mean gradient over the samples of all ranks."""
    expected = f"the gradient of one process on the samples of {RANKS} ranks, within {TOLERANCE:g} in float64"
    try:
        references = evidence.union_gradients
    except ProbeFailed as failed:
        return Check(
            "gradient_union", False, expected, str(failed), "loss(build_model(config), fetch(indices)) must work."
        )
    traces = evidence.two_ranks
    message = found = ""
    worst = 0.0
    for index, reference in enumerate(references):
        ranks = [trace.steps[index].gradients for trace in traces]
        if any(grad.dtype != torch.float64 for grads in ranks for grad in grads.values()):
            return Check(
                "gradient_union", False, expected, "gradients that are not float64", "Leave the dtype to torch."
            )
        scale = max((float(grad.abs().max()) for grad in reference.values()), default=1.0) or 1.0
        error = max(largest_difference(grads, reference) / scale for grads in ranks)
        worst = max(worst, error)
        if error > TOLERANCE and not message:
            found = f"a relative error of {error:.3g} in step {index + 1}"
            message = explain_error(ranks, reference)
    found = found or f"relative error {worst:.1g} in {len(references)} steps"
    if not references:
        found, message = "no gradients", "No step of a torch.optim optimizer was seen."
    return Check("gradient_union", not message, expected, found, message)


def explain_error(ranks: list[dict[str, torch.Tensor]], reference: dict[str, torch.Tensor]) -> str:
    """What the wrong gradient looks like."""
    if largest_difference(ranks[0], ranks[1]) > 0:
        return "The ranks have different gradients: they are not synchronized before the optimizer step."
    found, wanted = (torch.cat([each[name].flatten() for name in sorted(each)]) for each in (ranks[0], reference))
    ratio = float(found @ wanted / (wanted @ wanted)) if found.shape == wanted.shape and wanted.norm() > 0 else 0.0
    accumulation = BASE_CONFIG["accumulation"]
    named = {
        1 / RANKS: "1/ranks or 1/accumulation of it: the gradient is divided twice",
        float(RANKS): "ranks or accumulation times it: the gradient is summed where a mean is needed",
        float(RANKS * accumulation): "ranks x accumulation times it: nothing is divided",
        1 / (RANKS * accumulation): "1/(ranks x accumulation) of it: the gradient is divided twice",
    }
    for factor, text in named.items():
        if abs(ratio - factor) < 1e-6:
            return f"The gradient is {factor:g} times that of the union: {text}."
    return "All ranks have the same gradient, but not that of the union of their samples."


def sync_once(evidence: RunEvidence) -> Check:
    """The gradient is reduced once per optimizer step, not once per backward pass."""
    trace = evidence.two_ranks[0]
    step, size = trace.steps[-1], max(1, trace.gradient_bytes)
    ratio = step.reduced_bytes / size
    found = f"{ratio:.2f} times {format_bytes(size)} in {step.calls} collectives"
    passed = ratio <= MAX_REDUCTIONS
    message = (
        ""
        if passed
        else ("Every backward pass synchronizes: use no_sync for all but the last, or reduce after accumulation.")
    )
    return Check("sync_once", passed, "the gradient's bytes reduced once per optimizer step", found, message)
