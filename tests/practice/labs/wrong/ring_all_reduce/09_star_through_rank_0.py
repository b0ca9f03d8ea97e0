"""Rank 0 receives all tensors, sums them and sends the sum back. Expected check: bytes."""
# ruff: noqa: F401

import torch
import torch.distributed as dist
from meshwright_practice.labs.ring_all_reduce.solution import ring_all_gather, ring_reduce_scatter


def ring_all_reduce(tensor):
    if dist.get_rank():
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return
    for rank in range(1, dist.get_world_size()):
        received = torch.empty_like(tensor)
        dist.recv(received, rank)
        tensor += received
    for rank in range(1, dist.get_world_size()):
        dist.send(tensor, rank)
