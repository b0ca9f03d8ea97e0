"""Attends to every chunk that arrives, without a mask. Expected check: attention."""

import math

import torch
import torch.distributed as dist
from meshwright_practice.labs.ring_attention.solution import chunk_attention, merge


def ring_attention(q, k, v):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = torch.stack([k, v])
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -math.inf)
    for step in range(ranks):
        following, works = torch.empty_like(here), []
        if step < ranks - 1:
            works = [dist.isend(here, (rank + 1) % ranks), dist.irecv(following, (rank - 1) % ranks)]
        part = chunk_attention(q, here[0], here[1], None)
        out, lse = merge(out, lse, *part)
        for work in works:
            work.wait()
        here = following
    return out
