"""The reduce-scatter stops one step early. Expected check: reduce-scatter."""

import torch
import torch.distributed as dist
from meshwright_practice.labs.ring_all_reduce.solution import exchange, ring_all_gather


def ring_reduce_scatter(chunks):
    rank, ranks = dist.get_rank(), len(chunks)
    for step in range(ranks - 2):
        add_to = chunks[(rank - step - 1) % ranks]
        received = torch.empty_like(add_to)
        exchange(chunks[(rank - step) % ranks], received)
        add_to += received
    return (rank + 1) % ranks


def ring_all_reduce(tensor):
    chunks = list(tensor.view(-1).tensor_split(dist.get_world_size()))
    ring_all_gather(chunks, ring_reduce_scatter(chunks))
