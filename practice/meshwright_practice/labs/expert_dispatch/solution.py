"""Lab: dispatch tokens to experts, and combine what they return. The reference solution."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single


def route(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The stable order keeps the choices of one expert in the order of their tokens."""
    flat = chosen.flatten()
    return flat.argsort(stable=True), flat.bincount(minlength=experts)


def moe(tokens: Tensor, chosen: Tensor, gates: Tensor, local_experts: list[nn.Module], experts: int) -> Tensor:
    """Rows travel sorted by expert, so that those for one rank are contiguous."""
    ranks, per_token = dist.get_world_size(), chosen.shape[1]
    order, counts = route(chosen, experts)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts)  # (source rank, local expert)
    sent = counts.view(ranks, -1).sum(1).tolist()
    received = received_counts.view(ranks, -1).sum(1).tolist()
    rows = exchange(tokens[order // per_token], received, sent)
    pieces = rows.split(received_counts.tolist())
    outputs = torch.cat([local_experts[i % len(local_experts)](piece) for i, piece in enumerate(pieces)])
    returned = exchange(outputs, sent, received)
    weighted = returned * gates.flatten()[order, None]
    return torch.zeros_like(tokens).index_add(0, order // per_token, weighted)


def exchange(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
    """An all-to-all of rows with a gradient; the sizes are numbers of rows by rank."""
    output = rows.new_empty(sum(received), rows.shape[1])
    result: Tensor = all_to_all_single(output, rows.contiguous(), received, sent)
    return result
