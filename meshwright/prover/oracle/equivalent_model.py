"""Parameters that compute the same function with other roundings, to measure how much rounding changes a run.

The features of the residual stream and of the feed-forward are in reversed order, so every product sums in another
order. Pairs of parameters whose product alone matters are scaled by a factor and its inverse, so that low precision
rounds other numbers.
"""

from __future__ import annotations

from torch import Tensor

NORM, ROTATED, LINEAR = 1.3, 1.7, 0.6
"""Factors of normalized activations, of queries (keys have the inverse), and of values and inner activations. None is a
power of two, which would round as before.
"""
FACTORS = {
    "attention_norm": NORM,
    "ffn_norm": NORM,
    "norm": NORM,
    "head": 1 / NORM,
    "router": 1 / NORM,
    "gate": 1 / NORM,
    "q": ROTATED / NORM,
    "k": 1 / ROTATED / NORM,
    "v": LINEAR / NORM,
    "out": 1 / LINEAR,
    "up": LINEAR / NORM,
    "down": 1 / LINEAR,
}


def equivalent_parameters(parameters: dict[str, Tensor], tie: bool) -> dict[str, Tensor]:
    """The parameters of an equivalent model, in the graph of the given ones."""
    return {name: equivalent_parameter(name, value, tie) for name, value in parameters.items()}


def equivalent_parameter(name: str, value: Tensor, tie: bool) -> Tensor:
    parts = set(name.split("."))
    if "bias" in parts:
        return value
    (factor,) = [FACTORS[part] for part in parts & FACTORS.keys()] or [1.0]
    if tie and name == "decoder.norm.weight":  # the tied head cannot have the inverse: it is the embedding, too
        factor = 1.0
    value = value.flip(-2 if parts & {"out", "down"} else -1) * factor
    if parts & {"gate", "up"}:
        return value.flip(-2)
    return value.flip(-1) if "down" in parts else value
