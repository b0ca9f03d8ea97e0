"""Every rank sends before it receives, and waits for ever. Expected check: 4 ranks return."""
# ruff: noqa: F401

import torch
import torch.distributed as dist
from meshwright_practice.labs.ring_all_reduce.solution import ring_all_gather, ring_all_reduce


def ring_reduce_scatter(chunks):
    rank, ranks = dist.get_rank(), len(chunks)
    for step in range(ranks - 1):
        add_to = chunks[(rank - step - 1) % ranks]
        received = torch.empty_like(add_to)
        dist.send(chunks[(rank - step) % ranks], (rank + 1) % ranks)
        dist.recv(received, (rank - 1) % ranks)
        add_to += received
    return (rank + 1) % ranks
