"""The all-gather starts with chunk r, not with the complete one. Expected check: all-gather."""

import torch.distributed as dist
from meshwright_practice.labs.ring_all_reduce.solution import exchange, ring_reduce_scatter


def ring_all_gather(chunks, complete):
    rank, ranks = dist.get_rank(), len(chunks)
    for step in range(ranks - 1):
        exchange(chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks])


def ring_all_reduce(tensor):
    chunks = list(tensor.view(-1).tensor_split(dist.get_world_size()))
    ring_all_gather(chunks, ring_reduce_scatter(chunks))
