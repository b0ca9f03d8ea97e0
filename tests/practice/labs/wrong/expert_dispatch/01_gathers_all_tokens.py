"""Gathers the tokens of all ranks, and sums the outputs of all experts. Expected check: collectives."""

import torch
import torch.distributed as dist
from meshwright_practice.labs.expert_dispatch.solution import route  # noqa: F401
from torch.distributed.nn.functional import all_gather, all_reduce


def moe(tokens, chosen, gates, local_experts, experts):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, gates = torch.cat(all_gather(tokens)), torch.cat(all_gather(gates))
    everywhere = [torch.empty_like(chosen) for _ in range(ranks)]
    dist.all_gather(everywhere, chosen)
    chosen = torch.cat(everywhere)
    total = torch.zeros_like(tokens)
    for i, expert in enumerate(local_experts):
        weight = (gates * (chosen == rank * len(local_experts) + i)).sum(1, keepdim=True)
        total = total + expert(tokens) * weight
    return all_reduce(total).chunk(ranks)[rank]
