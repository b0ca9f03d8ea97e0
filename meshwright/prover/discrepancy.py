"""Finds the first quantity in which a layout differs from a single process, by what factor, and the likely cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isclose, isfinite

from torch import Tensor

from meshwright.prover.reference import StepResults
from meshwright.topology.layout import Layout


@dataclass(frozen=True)
class Tolerance:
    """The largest error, relative to the largest entry of the same tensor."""

    first_pass: float
    """For the loss, the gradients and the gradient norm of the first step."""
    later_steps: float
    """For everything that follows an update, where rounding errors have had steps to grow."""


@dataclass(frozen=True)
class Discrepancy:
    """A quantity compared with the single process."""

    quantity: str
    error: float
    """The relative error; infinite if the quantity is missing."""
    factor: float
    """The layout's value divided by the value of the single process."""
    cause: str = ""
    follows_update: bool = False

    def __str__(self) -> str:
        cause = f": {self.cause}" if self.cause else ""
        reference = "gradient" if self.quantity.startswith("gradient of") else "value"
        return (
            f"{self.quantity} differs from the single-process {reference} by a relative error of {self.error:.1e} "
            f"(factor {self.factor:.4g}){cause}"
        )


def find_first_discrepancy(
    expected: StepResults, results: list[StepResults], layout: Layout, accumulation: int, tolerance: Tolerance
) -> tuple[Discrepancy | None, float]:
    """The first quantity that exceeds the tolerance, in the order in which a step computes them, or None; and the
    largest error of all quantities.
    """
    max_error = 0.0
    discrepancies: list[Discrepancy] = []
    for compared in compare_all(expected, results):
        max_error = max(max_error, compared.error) if isfinite(compared.error) else float("inf")
        if not compared.error <= (tolerance.later_steps if compared.follows_update else tolerance.first_pass):
            discrepancies.append(compared)
    if not discrepancies:
        return None, max_error
    cause = discrepancies[0].cause or likely_cause(discrepancies, expected, results, layout, accumulation)
    return replace(discrepancies[0], cause=cause), max_error


def compare_all(expected: StepResults, results: list[StepResults]) -> Iterator[Discrepancy]:
    """Compares every quantity, in the order in which a step computes them."""
    first = results[0]
    gradients = {name: gradient for result in results for name, gradient in result.gradients.items()}  # of all stages
    updates = {name: update for result in results for name, update in result.updates.items()}
    yield compare_numbers("loss of step 0", expected.losses[0], first.losses[0])
    for name, right in expected.gradients.items():
        yield compare_tensors(f"gradient of {name}", right, gradients.get(name))
    for step, (norm, measured) in enumerate(zip(expected.norms, first.norms, strict=True)):
        if step:
            yield compare_numbers(f"loss of step {step}", expected.losses[step], first.losses[step], True)
        yield compare_numbers(f"gradient norm of step {step}", norm, measured, follows_update=step > 0)
    for name, right in expected.updates.items():
        yield compare_tensors(f"update of {name} over {len(expected.losses)} steps", right, updates.get(name), True)
    yield compare_numbers("evaluation loss", expected.evaluation, first.evaluation, True)
    for rank, result in enumerate(results):
        if (result.losses, result.norms, result.evaluation) != (first.losses, first.norms, first.evaluation):
            cause = "loss, gradient norm or evaluation loss differ between this rank and rank 0"
            yield Discrepancy(f"report of rank {rank}", float("inf"), float("nan"), cause)


def compare_numbers(quantity: str, right: float, measured: float, follows_update: bool = False) -> Discrepancy:
    error = abs(measured - right) / max(abs(right), 1e-300)
    return Discrepancy(quantity, error, measured / right if right else float("nan"), follows_update=follows_update)


def compare_tensors(quantity: str, right: Tensor, measured: Tensor | None, follows_update: bool = False) -> Discrepancy:
    if measured is None or measured.shape != right.shape:
        return Discrepancy(quantity, float("inf"), 0.0, "the tensor is missing")
    measured, right = measured.double(), right.double()
    # A tensor of zeros is divided by a tiny number instead of zero.
    error = float((measured - right).abs().max() / right.abs().max().clamp_min(1e-300))
    factor = float((measured * right).sum() / (right * right).sum().clamp_min(1e-300))
    return Discrepancy(quantity, error, factor, follows_update=follows_update)


def likely_cause(
    discrepancies: list[Discrepancy],
    expected: StepResults,
    results: list[StepResults],
    layout: Layout,
    accumulation: int,
) -> str:
    """The usual cause of a pattern of errors; '' if the pattern is not known."""
    gradients = [found for found in discrepancies if found.quantity.startswith("gradient of")]
    first = discrepancies[0]
    if gradients:
        return gradient_cause(gradients, first, layout, accumulation, list(expected.gradients))
    if first.quantity == "loss of step 0":
        factor = describe_factor(first.factor, layout, accumulation)
        return f"only the reported loss is wrong: {factor or 'it is not summed over all ranks'}"
    if first.quantity.startswith("gradient norm"):
        if first.factor > 1:
            return "replicated weights are counted more than once"
        return "the contribution of some ranks is missing"
    updates = [found.quantity for found in discrepancies if found.quantity.startswith("update of")]
    if updates and all("router.bias" in update for update in updates):
        return "only the router biases are wrong: the expert loads are not summed over all ranks"
    if first.quantity == "loss of step 1" and isclose(results[0].losses[1], expected.stale_loss, rel_tol=1e-6):
        return "stale parameters: the update did not reach the unsharded parameters"
    if first.quantity.startswith(("loss of step", "update of")):
        cause = "gradients and norm are correct, the update is not: clipping, weight decay or moments"
        return with_hints(cause, UPDATE_HINTS, layout_traits(layout, list(expected.gradients)))
    if first.quantity.startswith("evaluation"):
        return "training is correct, but evaluation does not count every token exactly once"
    return ""


FORWARD_HINTS = {
    "context": "positions, masks or labels of the sequence chunks (context)",
    "pipeline": "the order of the stages, or activations and labels of different micro-batches (pipeline)",
    "experts": "tokens that reach the wrong expert or return in the wrong order (experts)",
}
GRADIENT_HINTS = {
    "context": "gradients are not summed over the sequence chunks (context)",
    "pipeline": "a stage lacks the weight gradients of a micro-batch (pipeline)",
}
UPDATE_HINTS = {
    "pipeline": "a stage that does not clip by the global norm (pipeline)",
    "tied": "the head's copy of a tied weight is not updated (pipeline)",
    "experts": "router biases that follow the load of some ranks only, or that enter the routing weights (experts)",
}
"""Causes that exist only for a layout or model with the given trait, in addition to the general one."""


def layout_traits(layout: Layout, names: list[str]) -> set[str]:
    """The axes of a layout, "tied" for a pipeline with tied weights, and "experts" for a mixture of experts."""
    tied = layout.pipeline > 1 and not any(name.startswith("head") for name in names)
    experts = any(".router." in name for name in names)
    return set(layout.active_axes) | ({"tied"} if tied else set()) | ({"experts"} if experts else set())


def with_hints(cause: str, hints: dict[str, str], traits: set[str]) -> str:
    return "; or ".join([cause, *(hint for trait, hint in hints.items() if trait in traits)])


def gradient_cause(
    gradients: list[Discrepancy], first: Discrepancy, layout: Layout, accumulation: int, names: list[str]
) -> str:
    """The cause of wrong gradients. `names` are all parameters, in the order in which the forward pass uses them."""
    factors = [found.factor for found in gradients]
    wrong = [found.quantity.removeprefix("gradient of ") for found in gradients]
    traits = layout_traits(layout, names)
    if wrong == names and all(isclose(factor, factors[0], rel_tol=1e-3) for factor in factors):
        factor = describe_factor(factors[0], layout, accumulation)
        if factor:
            return factor
    if all("norm" in name for name in wrong) and layout.tensor > 1:
        return "gradients of norm weights are not summed over the sequence chunks (tensor)"
    if first.quantity.startswith("loss"):
        cause = "forward and backward are wrong: samples, rows, positions or masks, or tokens with unequal weights"
        return with_hints(cause, FORWARD_HINTS, traits)
    in_block = block_cause(wrong, names, traits)
    if in_block:
        return in_block
    if all(found.error < 0.02 and abs(found.factor - 1) < 0.01 for found in gradients):
        return "complete but rounded: a reduction in lower precision"
    tied = not any(name.startswith("head") for name in names)
    if all(name.startswith(("decoder.embedding", "head")) for name in wrong) and (tied or layout.tensor > 1):
        if layout.pipeline > 1 and tied:
            return "the head's gradient of a tied weight is missing, or not added exactly once (pipeline)"
        return "the gradients of the two uses of a tied weight, or of the vocabulary shards, are not combined"
    if wrong == names[: len(wrong)] and len(wrong) < len(names):
        last_correct = names[len(wrong)]
        return (
            f"backward is correct down to {last_correct} and wrong below: a bucket, activation checkpointing or a "
            "reduction over the tensor axis"
        )
    return with_hints("gradients of some ranks or micro-batches are missing or counted twice", GRADIENT_HINTS, traits)


def block_cause(wrong: list[str], names: list[str], traits: set[str]) -> str:
    """The cause inside the last block whose gradients are wrong; '' if the pattern is not known."""
    if all(is_expert_weight(name) for name in wrong):
        return "only expert weights are wrong: gradients are averaged or summed over the wrong process group"
    last = wrong[-1]
    if "context" in traits and last.endswith("attention.v.weight"):
        if last.replace(".v.", ".q.") not in wrong:
            return "gradients of keys and values do not return from other ranks (context)"
        return "gradients do not flow through attention to the tokens of other ranks (context)"
    if "experts" in traits and last.endswith("ffn.router.weight"):
        return "gradient of the balance loss: not of full sequences, or not weighted once over the batch (experts)"
    if "experts" in traits and last.endswith("ffn_norm.weight") and wrong == names[: len(wrong)]:
        return "gradients of the tokens that experts processed do not return (experts)"
    return ""


def is_expert_weight(name: str) -> bool:
    return ".bank." in name


def describe_factor(factor: float, layout: Layout, accumulation: int) -> str:
    """Which average or sum a factor comes from; '' if none fits."""
    if layout.pipeline > 1 and accumulation > 1 and isclose(factor * accumulation, 1, rel_tol=1e-3):
        return f"averaged over the {accumulation} micro-batches of the pipeline once too often"
    # Stages share no gradients, so the pipeline axis is tried last.
    axes = sorted(layout.active_mesh_axes, key=lambda axis: axis == "pipeline")
    degrees = {f"the {axis} axis ({getattr(layout, axis)})": getattr(layout, axis) for axis in axes}
    degrees |= {f"the {layout.data_degree} data-parallel ranks": layout.data_degree} if layout.data_degree > 1 else {}
    for name, degree in degrees.items():
        if isclose(factor * degree, 1, rel_tol=1e-3):
            return f"averaged over {name} once too often"
        if isclose(factor, degree, rel_tol=1e-3):
            return f"summed over {name} once too often"
    if accumulation > 1 and isclose(factor * accumulation, 1, rel_tol=1e-3):
        return f"divided by the {accumulation} micro-batches"
    if accumulation > 1 and isclose(factor, accumulation, rel_tol=1e-3):
        return f"not divided by the {accumulation} micro-batches"
    return ""
