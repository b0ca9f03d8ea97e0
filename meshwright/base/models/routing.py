"""How a router chooses and weights experts; torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Routing:
    """What families do differently with the scores of a router."""

    normalize: bool = True
    """whether the weights of a token's experts sum to one: the softmax over their scores, and not over all scores"""
    scale: float = 1.0
    """factor of the weights"""
    groups: int = 1
    """equal groups of consecutive experts"""
    groups_active: int = 1
    """groups that a token's experts come from: those with the best experts (arXiv:2405.04434, section 2.2.2)"""
    updates_bias: bool = True
    """whether the bias, which takes part in the choice alone, moves against the load after every step"""
