"""Divides by the number of ranks, as gradients are often averaged. Expected check: sum."""
# ruff: noqa: F401

import torch.distributed as dist
from meshwright_practice.labs.ring_all_reduce.solution import ring_all_gather, ring_reduce_scatter
from meshwright_practice.labs.ring_all_reduce.solution import ring_all_reduce as ring_sum


def ring_all_reduce(tensor):
    ring_sum(tensor)
    tensor /= dist.get_world_size()
