"""Stops one chunk too early. Expected check: bytes."""

import math

import torch
import torch.distributed as dist
from meshwright_practice.labs.ring_attention.solution import chunk_attention, merge


def ring_attention(q, k, v):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1)
    here = torch.stack([k, v])
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
    for step in range(ranks - 1):
        owner = (rank - step) % ranks
        following, works = torch.empty_like(here), []
        if step < ranks - 2:
            works = [dist.isend(here, (rank + 1) % ranks), dist.irecv(following, (rank - 1) % ranks)]
        if owner <= rank:
            part = chunk_attention(q, here[0], here[1], causal if owner == rank else None)
            out, lse = merge(out, lse, *part)
        for work in works:
            work.wait()
        here = following
    return out
