"""Tolerances from measured rounding noise: the reference computed with other rounding, over several seeds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import torch

from meshwright.prover.compare.discrepancy import EXACT, LR_TOLERANCE, Difference, Quantity

MARGIN = {"fp64": 1000.0, "fp32": 12.0, "bf16": 5.0, "fp16": 5.0, "fp8": 5.0}
"""How much more than the measured noise a run may differ: ranks sum in another order, and in more parts."""
MIN_NOISE = {
    "fp64": 4 * torch.finfo(torch.float64).eps,
    "fp32": 4 * torch.finfo(torch.float32).eps,
    "bf16": torch.finfo(torch.bfloat16).eps / 16,
    "fp16": torch.finfo(torch.float16).eps / 16,
    "fp8": torch.finfo(torch.float8_e4m3fn).eps / 16,
}
"""Noise that a single seed may happen not to show."""
SECOND_MOMENTS = ("exp_avg_sq", "row_var", "col_var", "variance")
"""Optimizer state of squared gradients, whose relative noise is twice that of the gradients."""
MAX_FACTOR = 0.25
MAX_ERROR = 1.0
"""Tolerances above which a precision proves nothing about a quantity: they would hide a factor of 1.25, or an error as
large as the quantity."""


@dataclass
class Tolerances:
    """The largest error and the largest deviation of the factor from 1 that rounding explains, by quantity."""

    precision: str
    errors: dict[Quantity, float] = field(default_factory=dict)
    factors: dict[Quantity, float] = field(default_factory=dict)

    @classmethod
    def from_noise(
        cls, precision: str, repetitions: Iterable[Iterable[Difference]], common: bool = False
    ) -> Tolerances:
        """`repetitions` compare a rounded reference with the exact one, each under another seed. With `common`, all
        quantities of a kind have the noise of the noisiest: a token that rounding routes to another expert changes
        them all. Below float64, every step starts from the state of the run, so that noise does not grow: a quantity
        has at least its median noise over the steps, because a few seeds of one step may happen to agree with the exact
        value. Where all seeds agree bit by bit, nothing is rounded: a skipped step changes nothing.
        """
        noise: dict[Quantity, tuple[float, float]] = {}
        for differences in repetitions:
            for found in differences:
                error, factor = noise.get(found.quantity, (0.0, 0.0))
                noise[found.quantity] = (max(error, found.error), max(factor, found.factor_error))
        of_kind: dict[tuple[str, int], list[tuple[float, float]]] = {}
        over_steps: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for quantity, values in noise.items():
            of_kind.setdefault((quantity.kind, quantity.step), []).append(values)
            over_steps.setdefault((quantity.kind, quantity.name), []).append(values)
        tolerances = cls(precision)
        for quantity, values in noise.items():
            errors, factors = zip(*of_kind[quantity.kind, quantity.step], strict=True)
            margin, typical_noise = MARGIN[precision], max if common else median
            is_squared = quantity.kind == "moments" and quantity.name.endswith(SECOND_MOMENTS)
            floor = MIN_NOISE[precision] * (2 if is_squared else 1)
            if precision != "fp64" and values[0] > 0:
                of_steps = zip(*over_steps[quantity.kind, quantity.name], strict=True)
                error, factor = (max(own, median(others)) for own, others in zip(values, of_steps, strict=True))
            else:
                error, factor = values
            tolerances.errors[quantity] = margin * max(error, typical_noise(errors), floor)
            tolerances.factors[quantity] = margin * max(factor, typical_noise(factors), floor)
        return tolerances

    def accepts(self, found: Difference) -> bool:
        """Whether rounding explains a difference."""
        if found.quantity.kind in EXACT:
            return found.error == 0
        if found.quantity.kind == "lr":
            return found.error <= LR_TOLERANCE
        error, factor = self.errors.get(found.quantity, 0.0), self.factors.get(found.quantity, 0.0)
        return found.error <= error + found.resolution and found.factor_error <= factor + found.resolution

    def too_noisy(self) -> list[Quantity]:
        """The quantities about which this precision proves nothing."""
        return [
            quantity
            for quantity, factor in self.factors.items()
            if quantity.kind not in EXACT and not (factor <= MAX_FACTOR and self.errors[quantity] <= MAX_ERROR)
        ]
