"""One attention call of a model as context parallelism sees it, whichever seam it comes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(queries, keys, values, mask) -> output; tensors have shape (batch, heads, tokens, head size)"""


@dataclass(frozen=True)
class AttentionCall:
    """Queries, keys and values of a rank's chunks, and what the model computes of them on full sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    attend: Attend
    """the model's own attention, on full sequences of some of its heads"""
    mask: Tensor | None = None
    """the mask of full sequences, (batch, heads, sequence, sequence); the first three may be 1"""
    causal: bool = True
    """where there is no mask: whether a query sees only keys that are not later"""
    scale: float | None = None
    """the factor of the scores; None: 1 / sqrt(head size)"""
    documents: Tensor | None = None
    """the document of every token of the full sequences, (batch, sequence)"""
    beyond_plain: str = ""
    """what makes this more than softmax(scale q k) v, such as `a soft cap`; empty: nothing"""
