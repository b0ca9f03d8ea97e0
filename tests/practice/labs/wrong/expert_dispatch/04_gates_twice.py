"""Weights the rows before they leave and when they return. Expected check: outputs."""

import torch
import torch.distributed as dist
from meshwright_practice.labs.expert_dispatch.solution import exchange, route


def moe(tokens, chosen, gates, local_experts, experts):
    ranks, per_token = dist.get_world_size(), chosen.shape[1]
    order, counts = route(chosen, experts)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts)
    sent = counts.view(ranks, -1).sum(1).tolist()
    received = received_counts.view(ranks, -1).sum(1).tolist()
    rows = exchange(tokens[order // per_token], received, sent)
    pieces = rows.split(received_counts.tolist())
    outputs = torch.cat([local_experts[i % len(local_experts)](piece) for i, piece in enumerate(pieces)])
    returned = exchange(outputs, sent, received)
    returned = returned * gates.flatten()[order, None]
    weighted = returned * gates.flatten()[order, None]
    return torch.zeros_like(tokens).index_add(0, order // per_token, weighted)
