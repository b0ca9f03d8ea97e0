"""From numbers that differ to a name: the first thing that is off, by what factor, and what usually causes that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose, isfinite

from torch import Tensor

from meshwright.prover.reference import StepResults
from meshwright.topology.layout import Layout


@dataclass(frozen=True)
class Tolerance:
    """Largest error, relative to the largest entry of the same tensor: of one pass, and of what steps build on it."""

    first: float
    later: float


@dataclass(frozen=True)
class Discrepancy:
    """What is off: `what` is a quantity, or the gradient or the steps of a parameter."""

    what: str
    error: float
    factor: float
    cause: str = ""
    later: bool = False
    """whether roundings had steps to grow in"""

    def __str__(self) -> str:
        cause = f": {self.cause}" if self.cause else ""
        return f"{self.what} is off by {self.error:.1e}, {self.factor:.4g} times the right one{cause}"


def find_first_discrepancy(
    expected: StepResults, found: list[StepResults], layout: Layout, accumulation: int, tolerance: Tolerance
) -> tuple[Discrepancy | None, float]:
    """(the first thing that is off in the order of a step, or None; the largest error met)."""
    worst = 0.0
    offs: list[Discrepancy] = []
    for off in compare_all(expected, found):
        worst = max(worst, off.error) if isfinite(off.error) else float("inf")
        if not off.error <= (tolerance.later if off.later else tolerance.first):
            offs.append(off)
    if not offs:
        return None, worst
    cause = offs[0].cause or likely_cause(offs, expected, found, layout, accumulation)
    return Discrepancy(offs[0].what, offs[0].error, offs[0].factor, cause), worst


def compare_all(expected: StepResults, found: list[StepResults]) -> Iterator[Discrepancy]:
    """Everything compared, in the order in which a step computes it."""
    first = found[0]
    gradients = {name: gradient for trail in found for name, gradient in trail.gradients.items()}  # stage by stage
    moved = {name: way for trail in found for name, way in trail.updates.items()}
    yield compare_numbers("loss of step 0", expected.losses[0], first.losses[0])
    for name, right in expected.gradients.items():
        yield compare_tensors(f"gradient of {name}", right, gradients.get(name))
    for step, (norm, got) in enumerate(zip(expected.norms, first.norms, strict=True)):
        if step:
            yield compare_numbers(f"loss of step {step}", expected.losses[step], first.losses[step], later=True)
        yield compare_numbers(f"gradient norm of step {step}", norm, got, later=step > 0)
    for name, right in expected.updates.items():
        yield compare_tensors(f"way of {name} in {len(expected.losses)} steps", right, moved.get(name), later=True)
    yield compare_numbers("evaluation loss", expected.evaluation, first.evaluation, later=True)
    for rank, trail in enumerate(found):
        if (trail.losses, trail.norms, trail.evaluation) != (first.losses, first.norms, first.evaluation):
            yield Discrepancy(f"what rank {rank} says of loss and norm, against rank 0,", float("inf"), float("nan"))


def compare_numbers(what: str, right: float, got: float, later: bool = False) -> Discrepancy:
    error = abs(got - right) / max(abs(right), 1e-300)
    return Discrepancy(what, error, got / right if right else float("nan"), later=later)


def compare_tensors(what: str, right: Tensor, got: Tensor | None, later: bool = False) -> Discrepancy:
    if got is None or got.shape != right.shape:
        return Discrepancy(what, float("inf"), 0.0, "it is not there")
    got, right = got.double(), right.double()  # what never moves is divided by next to nothing
    error = float((got - right).abs().max() / right.abs().max().clamp_min(1e-300))
    factor = float((got * right).sum() / (right * right).sum().clamp_min(1e-300))
    return Discrepancy(what, error, factor, later=later)


def likely_cause(
    offs: list[Discrepancy], expected: StepResults, found: list[StepResults], layout: Layout, accumulation: int
) -> str:
    """What a pattern of errors usually comes from; '' where it fits none."""
    gradients = [off for off in offs if off.what.startswith("gradient of")]
    if gradients:
        return gradient_cause(gradients, offs[0], layout, accumulation, list(expected.gradients))
    first = offs[0]
    if first.what.startswith("loss of step 0"):
        return (
            f"the loss alone is: {clean_factor(first.factor, layout, accumulation) or 'it is not the sum over ranks'}"
        )
    if first.what.startswith("gradient norm"):
        inflated = "weights that ranks hold alike are counted more than once"
        return inflated if first.factor > 1 else "not every rank's part is counted"
    ways = [off.what for off in offs if off.what.startswith("way of")]
    if ways and all("router.bias" in way for way in ways):
        return "router biases alone are: loads are not those of all ranks"
    if first.what.startswith("loss of step 1") and isclose(found[0].losses[1], expected.stale_loss, rel_tol=1e-6):
        return "stale parameters: the step before did not reach what was gathered"
    if first.what.startswith("loss of step") or first.what.startswith("way of"):
        said = "gradients and norm are right, the update is not: clipping, decay or moments"
        return with_hints(said, UPDATES, traits_of(layout, list(expected.gradients)))
    if first.what.startswith("evaluation"):
        return "training is right, evaluation does not weigh every token once"
    return ""


FORWARD = {
    "context": "positions, masks or labels of the pieces (context)",
    "pipeline": "the order of stages, or activations and labels of different micro-batches (pipeline)",
    "experts": "rows that reach other experts or come back in another order (experts)",
}
SUMS = {
    "context": "gradients are not summed over the pieces of sequences (context)",
    "pipeline": "a stage lacks the weight gradients of a micro-batch (pipeline)",
}
UPDATES = {
    "pipeline": "a stage that does not clip by the norm of all (pipeline)",
    "tied": "the head's copy of a tied weight does not follow (pipeline)",
    "experts": "router biases moved by less than the load of all ranks, or weighing as well as choosing (experts)",
}
"""What a layout may have wrong beside what any may."""


def traits_of(layout: Layout, names: list[str]) -> set[str]:
    tied = layout.pipeline > 1 and not any(name.startswith("head") for name in names)
    experts = any(".router." in name for name in names)
    return set(layout.active_axes) | ({"tied"} if tied else set()) | ({"experts"} if experts else set())


def with_hints(said: str, hints: dict[str, str], traits: set[str]) -> str:
    return "; or ".join([said, *(hint for trait, hint in hints.items() if trait in traits)])


def gradient_cause(
    gradients: list[Discrepancy], first: Discrepancy, layout: Layout, accumulation: int, names: list[str]
) -> str:
    """`names` are those of all gradients, in the order in which the forward pass uses the parameters."""
    factors = [off.factor for off in gradients]
    off_names = [off.what.removeprefix("gradient of ") for off in gradients]
    traits = traits_of(layout, names)
    if off_names == names and all(isclose(factor, factors[0], rel_tol=1e-3) for factor in factors):
        clean = clean_factor(factors[0], layout, accumulation)
        if clean:
            return clean
    if all("norm" in name for name in off_names) and layout.tensor > 1:
        return "norm weights are not summed over the pieces of the sequence (tensor)"
    if first.what.startswith("loss"):
        said = "forward and backward are: wrong samples, rows, positions or masks, or tokens not weighed alike"
        return with_hints(said, FORWARD, traits)
    within = block_cause(off_names, names, traits)
    if within:
        return within
    if all(off.error < 0.02 and abs(off.factor - 1) < 0.01 for off in gradients):
        return "all there, but rounded: a sum in lower precision"
    tied = not any(name.startswith("head") for name in names)
    if all(name.startswith(("decoder.embedding", "head")) for name in off_names) and (tied or layout.tensor > 1):
        if layout.pipeline > 1 and tied:
            return "the head's use of a tied weight is missing, or not added once (pipeline)"
        return "the two uses of a tied weight, or the vocabulary's rows, are not put together"
    if off_names == names[: len(off_names)] and len(off_names) < len(names):
        right = names[len(off_names)]
        return f"backward is right down to {right} and not below: a bucket, a recomputation or a sum over tensor"
    return with_hints("gradients of ranks or micro-steps are not all there, or not each once", SUMS, traits)


def block_cause(off_names: list[str], names: list[str], traits: set[str]) -> str:
    """Where inside the last block that is off backward goes wrong; '' where that is nowhere special."""
    if all(".bank." in name for name in off_names):
        return "experts' weights alone are: gradients are divided by, or summed over, the wrong group of ranks"
    last = off_names[-1]
    if "context" in traits and last.endswith("attention.v.weight"):
        if last.replace(".v.", ".q.") not in off_names:
            return "gradients of keys and values do not come home from other ranks (context)"
        return "gradients do not come back through attention to other ranks' tokens (context)"
    if "experts" in traits and last.endswith("ffn.router.weight"):
        return "the pull of the balance loss: not of whole sequences, or not weighed once over the batch (experts)"
    if "experts" in traits and last.endswith("ffn_norm.weight") and off_names == names[: len(off_names)]:
        return "gradients of the rows that experts took do not come back (experts)"
    return ""


def clean_factor(factor: float, layout: Layout, accumulation: int) -> str:
    if layout.pipeline > 1 and accumulation > 1 and isclose(factor * accumulation, 1, rel_tol=1e-3):
        return f"averaged over the pipeline's {accumulation} micro-batches once too often"
    used = sorted(
        layout.active_mesh_axes, key=lambda axis: axis == "pipeline"
    )  # stages share no gradients: the others come first
    degrees = {f"{axis} ({getattr(layout, axis)})": getattr(layout, axis) for axis in used}
    degrees |= {f"the {layout.data_degree} data-parallel ranks": layout.data_degree} if layout.data_degree > 1 else {}
    for name, degree in degrees.items():
        if isclose(factor * degree, 1, rel_tol=1e-3):
            return f"averaged over {name} once too often"
        if isclose(factor, degree, rel_tol=1e-3):
            return f"summed over {name} once too often"
    if accumulation > 1 and isclose(factor * accumulation, 1, rel_tol=1e-3):
        return f"divided by the {accumulation} micro-steps"
    if accumulation > 1 and isclose(factor, accumulation, rel_tol=1e-3):
        return f"not divided by the {accumulation} micro-steps"
    return ""
