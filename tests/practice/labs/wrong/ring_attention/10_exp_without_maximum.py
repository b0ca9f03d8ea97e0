"""Exponentiates the scores as they are, which overflows. Expected check: large scores."""

import math

from meshwright_practice.labs.ring_attention.solution import merge, ring_attention  # noqa: F401


def chunk_attention(q, k, v, mask):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(mask, -math.inf)
    weights = scores.exp()
    total = weights.sum(-1)
    return weights @ v / total[..., None], total.log()
