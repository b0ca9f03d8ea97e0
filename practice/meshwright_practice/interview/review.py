"""The written review of a submission in five parts, with the figures that were measured on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from meshwright.base.io import format_bytes, format_percent, format_seconds
from meshwright_practice.interview.checks.phases import PHASE_NAMES, all_steps, phase_seconds
from meshwright_practice.interview.evidence import KILL_AT, RANKS, STEPS, RunEvidence
from meshwright_practice.interview.grade import GateResult
from meshwright_practice.interview.rank.probes import largest_difference
from meshwright_practice.interview.runner import ProbeFailed

Value = TypeVar("Value")


@dataclass(frozen=True)
class Review:
    """Sentences per part. `figures` are the measured numbers in them, for machines."""

    problem: list[str]
    mechanism: list[str]
    communication: list[str]
    tradeoff: list[str]
    measurement: list[str]
    figures: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        parts = ("problem", "mechanism", "communication", "tradeoff", "measurement")
        blocks = ["\n".join([part.capitalize(), *(f"  {line}" for line in getattr(self, part))]) for part in parts]
        return "\n\n".join(blocks)


def measured(read: Callable[[], Value]) -> Value | None:
    """A part of the evidence, or None if the user's code did not get that far."""
    try:
        return read()
    except ProbeFailed:
        return None


def write_review(evidence: RunEvidence, results: Sequence[GateResult]) -> Review:
    """Reviews what was checked. Nothing is run for the review that no check has run: a part says what is not known."""
    ran = vars(evidence)  # the probes that checks have run
    figures: dict[str, float] = {}
    status = {check.name: check for result in results for check in result.checks}

    def known(name: str) -> bool:
        return name in ran

    def sentence(name: str, good: str) -> list[str]:
        """`good` if the check passed, else what was found; nothing if it was not checked."""
        if (check := status.get(name)) is None:
            return []
        return [
            good
            if check.passed
            else f"Not yet: expected {check.expected}; found {check.found}. {check.message}".rstrip()
        ]

    return Review(
        problem(evidence, known, figures),
        [
            *sentence(
                "partition_overlap", "Every sample of an epoch is on exactly one rank; the order is that of partition."
            ),
            *sentence("partition_padding", "No sample is repeated to make ranks equally long."),
            *sentence("partition_reshuffle", "The order changes with the epoch."),
            *sentence(
                "gradient_union", f"{RANKS} ranks have the gradient of one process on all their samples, in float64."
            ),
            *sentence("restart_state", f"A run killed in step {KILL_AT + 1} of {STEPS} ends with the same parameters."),
            *sentence("config_identity", "A resume with other settings is refused."),
        ]
        or ["Nothing of it was checked yet."],
        communication(evidence, known, figures),
        tradeoff(evidence, known, figures),
        measurement(evidence, known, figures, results),
        figures,
    )


def problem(evidence: RunEvidence, known: Callable[[str], bool], figures: dict[str, float]) -> list[str]:
    options = ", ".join(f"{option} = {answer}" for option, answer in evidence.options.items())
    lines = [f"Assumptions: {options}."]
    if not known("single"):
        return [*lines, "No run of the code ended on one rank."]
    trace = evidence.single[0]
    figures["gradient_bytes"] = trace.gradient_bytes
    if trace.losses:
        figures |= {"first_loss": trace.losses[0], "last_loss": trace.losses[-1]}
        lines.append(
            f"One process holds {format_bytes(trace.gradient_bytes)} of parameters; its loss goes from "
            f"{trace.losses[0]:.4g} to {trace.losses[-1]:.4g} in {len(trace.losses)} steps, "
            f"{format_seconds(trace.seconds)}."
        )
    return lines


def communication(evidence: RunEvidence, known: Callable[[str], bool], figures: dict[str, float]) -> list[str]:
    if not known("two_ranks") or not evidence.two_ranks[0].steps:
        return ["Not measured: no step on two ranks."]
    trace = evidence.two_ranks[0]
    step = trace.steps[-1]
    wire = 2 * (RANKS - 1) / RANKS * step.reduced_bytes
    figures |= {
        "reduced_bytes_per_step": step.reduced_bytes,
        "collectives_per_step": step.calls,
        "wire_bytes_per_step": wire,
    }
    ratio = step.reduced_bytes / max(1, trace.gradient_bytes)
    lines = [
        f"A step reduces {format_bytes(step.reduced_bytes)} in {step.calls} collectives: {ratio:.2f} times the "
        f"gradient of {format_bytes(trace.gradient_bytes)}. A ring sends 2(N-1)/N of that, {format_bytes(wire)} per "
        f"rank with N = {RANKS}, "
        "and this does not grow with the batch."
    ]
    if step.calls > 1 and ratio <= 1.5:
        lines.append(
            f"{step.calls} collectives each pay their latency: one flat buffer, or DDP's buckets, would pay it once."
        )
    return lines


def tradeoff(evidence: RunEvidence, known: Callable[[str], bool], figures: dict[str, float]) -> list[str]:
    lines = []
    if known("restarts") and evidence.restarts.get("bytes"):
        size = evidence.restarts["bytes"]
        figures["checkpoint_bytes"] = size
        lines.append(f"A checkpoint has {format_bytes(size)} in entries {', '.join(evidence.restarts['keys'])}.")
    if known("uninterrupted") and (seconds := evidence.uninterrupted[0].save_seconds):
        figures["save_seconds"] = seconds
        share = seconds / max(1e-9, evidence.uninterrupted[0].seconds / max(1, len(evidence.uninterrupted[0].steps)))
        lines.append(
            f"One save takes {format_seconds(seconds)}, {format_percent(share)} of a mean step of this run: save_every "
            "trades the time of saves against the steps that a failure costs."
        )
    if known("resumed"):
        lost = KILL_AT - evidence.resumed.saved_step
        figures["lost_steps"] = lost
        lines.append(
            f"The kill in step {KILL_AT + 1} costs {lost} finished step{'s' if lost != 1 else ''}; the checkpoint is "
            f"after step {evidence.resumed.saved_step}."
        )
    return lines or ["Not measured: no checkpoint was written and read."]


def measurement(
    evidence: RunEvidence, known: Callable[[str], bool], figures: dict[str, float], results: Sequence[GateResult]
) -> list[str]:
    lines = []
    if known("two_ranks") and evidence.two_ranks[0].steps:
        trace = evidence.two_ranks[0]
        rate = sum(len(step.samples) for each in evidence.two_ranks for step in each.steps) / max(1e-9, trace.seconds)
        figures["samples_per_second"] = rate
        lines.append(f"Progress: {rate:.0f} samples/s over {RANKS} ranks on this machine.")
    if known("records") and (
        steps := [step for step in all_steps(evidence) if phase_seconds(step, "forward") is not None]
    ):
        total = sum(float(step["seconds"]) for step in steps)
        shares = {
            name: sum(phase_seconds(step, name) or 0.0 for step in steps) / max(1e-9, total) for name in PHASE_NAMES
        }
        figures |= {f"share_{name}": share for name, share in shares.items()}
        text = ", ".join(f"{name} {format_percent(share)}" for name, share in shares.items())
        rest = format_percent(max(0.0, 1 - sum(shares.values())))
        lines.append(f"Your own phases, over all ranks and steps: {text}; {rest} is in none.")
    if known("resumed") and known("uninterrupted"):
        difference = measured(lambda: largest_difference(evidence.resumed.final, evidence.uninterrupted[0].final))
        if difference is not None:
            figures["resume_difference"] = difference
            lines.append(f"Largest difference of a parameter after the resume: {difference:.3g}.")
    checks = [check for result in results for check in result.checks]
    waiting = sum(len(result.not_checked) for result in results)
    passed = sum(check.passed for check in checks)
    figures |= {"checks_passed": passed, "checks": len(checks) + waiting}
    lines.append(
        f"{passed} of {len(checks) + waiting} checks pass" + (f"; {waiting} wait for others." if waiting else ".")
    )
    return lines
