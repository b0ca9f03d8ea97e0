"""Compares the trace of a run with that of the reference, quantity by quantity in the order in which a step computes
them, and names the first difference: step, phase, rank, error, factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite, isnan

import torch
from torch import Tensor

from meshwright.prover.trace import StepTrace, Trace

PHASES = {
    "initial": "start",
    "inputs": "fetch",
    "tokens": "fetch",
    "loss": "forward",
    "gradient": "backward",
    "norm": "sync",
    "loss scale": "update",
    "lr": "update",
    "update": "update",
    "moments": "update",
    "evaluated tokens": "evaluate",
    "evaluation": "evaluate",
}
"""The kinds of quantities, in the order in which a step computes them, and the phase that computes each."""

EXACT = ("inputs", "tokens", "evaluated tokens", "initial", "loss scale")
"""Kinds that must be equal to the last bit."""
LR_TOLERANCE = 1e-12
FACTOR_TOLERANCE = 2e-5
"""Factors that differ by no more are the same, unless the precision is low."""
TINY = 1e-300


@dataclass(frozen=True)
class Quantity:
    """One number or tensor of a run."""

    kind: str
    step: int
    name: str = ""
    """The name of a parameter; '' for numbers."""

    def __str__(self) -> str:
        match self.kind:
            case "initial":
                return f"initial value of {self.name}"
            case "inputs":
                return f"{self.name} of step {self.step}"
            case "tokens":
                return f"token count of step {self.step}"
            case "loss":
                return f"loss of step {self.step}"
            case "gradient":
                return f"gradient of {self.name} in step {self.step}"
            case "norm":
                return f"gradient norm of step {self.step}"
            case "loss scale":
                return f"loss scale of step {self.step}"
            case "lr":
                return f"learning rate of step {self.step}"
            case "update":
                return f"update of {self.name} in step {self.step}"
            case "moments":
                return f"optimizer state {self.name} after step {self.step}"
        return f"{'token count of the ' if self.kind == 'evaluated tokens' else ''}evaluation after step {self.step}"


@dataclass(frozen=True)
class Difference:
    """A quantity compared with the reference."""

    quantity: Quantity
    error: float
    """The norm of the error relative to that of the reference; infinite if the quantity is missing or not finite."""
    factor: float
    """The projection of the run's value on the reference's: 1 if they are equal."""
    element: tuple[int, ...] = ()
    """The index of the largest error."""
    resolution: float = 0.0
    """The error that the rounding of stored parameters alone explains."""

    @property
    def factor_error(self) -> float:
        return abs(self.factor - 1) if not isnan(self.factor) else 0.0


def compare_traces(
    expected: Trace, measured: Trace, states: Sequence[Mapping[str, Tensor]] | None = None
) -> Iterator[Difference]:
    """Compares every quantity, in the order in which the run computes them. `states` are the parameters from which both
    sides computed each step; by default each side continues from its own.
    """
    for name, right in expected.initial.items():
        yield compare_tensors(Quantity("initial", -1, name), right, measured.initial.get(name))
    evaluations = dict.fromkeys([step for step, *_ in (*expected.evaluations, *measured.evaluations)])
    before: Mapping[str, Tensor] = expected.initial
    measured_before: Mapping[str, Tensor] = measured.initial
    steps = {step.step: step for step in measured.steps}
    for index, right_step in enumerate(expected.steps):
        number = right_step.step
        if states is not None:
            before = measured_before = states[index]
        if number not in steps:
            yield Difference(Quantity("loss", number), float("inf"), float("nan"))
            return
        yield from compare_step(right_step, steps[number], before, measured_before)
        before, measured_before = right_step.parameters, steps[number].parameters
        if number in evaluations:
            yield from compare_evaluations(number, expected, measured)
    if not expected.steps:
        return
    if len(measured.steps) != len(expected.steps):
        yield Difference(Quantity("loss", measured.steps[-1].step), float("inf"), float("nan"))
    yield from compare_moments(expected.steps[-1].step, expected.moments, measured.moments)


def compare_moments(step: int, right: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[Difference]:
    for name, moment in right.items():
        yield compare_tensors(Quantity("moments", step, name), moment, found.get(name))


def compare_step(
    right: StepTrace, step: StepTrace, before: Mapping[str, Tensor], measured_before: Mapping[str, Tensor]
) -> Iterator[Difference]:
    number = right.step
    for name, values in right.inputs.items():
        yield compare_tensors(Quantity("inputs", number, name), values, step.inputs.get(name))
    yield compare_numbers(Quantity("tokens", number), right.tokens, step.tokens)
    yield compare_numbers(Quantity("loss", number), right.loss, step.loss)
    if not isnan(right.loss):
        for name, gradient in right.gradients.items():
            found = step.gradients.get(name)
            if found is None and not gradient.any():
                continue  # a parameter that takes no part has no gradient, or a gradient of zeros
            yield compare_tensors(Quantity("gradient", number, name), gradient, found)
        yield compare_numbers(Quantity("norm", number), right.grad_norm, step.grad_norm)
    yield compare_numbers(Quantity("loss scale", number), right.loss_scale, step.loss_scale)
    yield compare_numbers(Quantity("lr", number), right.lr, step.lr)
    for name, after in right.parameters.items():
        change = after.double() - before[name].double()
        found = step.parameters.get(name)
        if found is None:
            yield Difference(Quantity("update", number, name), float("inf"), float("nan"))
            continue
        found_change = found.double() - measured_before[name].double()
        resolution = torch.finfo(found.dtype).eps * float(found.double().norm())
        yield compare_tensors(Quantity("update", number, name), change, found_change, resolution)
    yield from compare_moments(number, right.moments, step.moments)


def compare_evaluations(step: int, expected: Trace, measured: Trace) -> Iterator[Difference]:
    right = [(loss, tokens) for number, loss, tokens in expected.evaluations if number == step]
    found = [(loss, tokens) for number, loss, tokens in measured.evaluations if number == step]
    if len(right) != 1 or len(found) != 1:
        yield Difference(Quantity("evaluation", step), float("inf"), float("nan"))
        return
    yield compare_numbers(Quantity("evaluated tokens", step), right[0][1], found[0][1])
    yield compare_numbers(Quantity("evaluation", step), right[0][0], found[0][0])


def compare_numbers(quantity: Quantity, right: float, measured: float) -> Difference:
    if not isfinite(right) and not isfinite(measured):
        return Difference(quantity, 0.0, 1.0)
    if not isfinite(right) or not isfinite(measured):
        return Difference(quantity, float("inf"), float("nan"))
    if right == 0:
        return Difference(quantity, 0.0 if measured == 0 else float("inf"), 1.0 if measured == 0 else float("nan"))
    return Difference(quantity, abs(measured - right) / abs(right), measured / right)


def compare_tensors(quantity: Quantity, right: Tensor, measured: Tensor | None, resolution: float = 0.0) -> Difference:
    """Compares in the Euclidean norm: AdamW turns the rounding of a gradient near zero into a full-size update of one
    element, which says nothing about the tensor.
    """
    if measured is None or measured.shape != right.shape:
        return Difference(quantity, float("inf"), float("nan"))
    if not right.numel():
        return Difference(quantity, 0.0, 1.0)
    right, measured = right.double(), measured.double()
    wrong = measured - right
    size, distance = float(right.norm()), float(wrong.norm())
    error = distance / max(size, TINY) if distance != 0 else 0.0
    factor = float((measured * right).sum()) / size**2 if size > TINY else 1.0
    largest = torch.tensor(int(wrong.abs().argmax()))
    element = tuple(int(i) for i in torch.unravel_index(largest, right.shape)) if right.ndim else ()
    return Difference(quantity, float("inf") if isnan(error) else error, factor, element, resolution / max(size, TINY))


def equal_within(one: float, other: float, tolerance: float = FACTOR_TOLERANCE) -> bool:
    """Whether two factors are the same but for rounding."""
    return isclose(one, other, rel_tol=tolerance)
