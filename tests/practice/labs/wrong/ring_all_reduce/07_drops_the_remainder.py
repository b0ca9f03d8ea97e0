"""Divides into chunks of length // N and forgets the rest of the elements. Expected check: any length."""

import torch.distributed as dist
from meshwright_practice.labs.ring_all_reduce.solution import ring_all_gather, ring_reduce_scatter


def ring_all_reduce(tensor):
    ranks = dist.get_world_size()
    length = tensor.numel() // ranks
    chunks = list(tensor.view(-1)[: length * ranks].split(length))
    ring_all_gather(chunks, ring_reduce_scatter(chunks))
