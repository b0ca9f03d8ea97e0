"""Leaves out the all-gather, so that each rank has the sum of one chunk only. Expected check: sum."""
# ruff: noqa: F401

import torch.distributed as dist
from meshwright_practice.labs.ring_all_reduce.solution import ring_all_gather, ring_reduce_scatter


def ring_all_reduce(tensor):
    ring_reduce_scatter(list(tensor.view(-1).tensor_split(dist.get_world_size())))
