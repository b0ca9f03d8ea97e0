"""Passes whole tensors around the ring instead of chunks. Expected check: bytes."""
# ruff: noqa: F401

import torch
import torch.distributed as dist
from meshwright_practice.labs.ring_all_reduce.solution import exchange, ring_all_gather, ring_reduce_scatter


def ring_all_reduce(tensor):
    passing, received = tensor.clone(), torch.empty_like(tensor)
    for _ in range(dist.get_world_size() - 1):
        exchange(passing, received)
        tensor += received
        passing, received = received, passing
