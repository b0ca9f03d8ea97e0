"""The entropy of a policy at every token, exact over the vocabulary and without a gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

CHUNK = 1024
"""Tokens whose probabilities exist at the same time."""


@torch.no_grad()
def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Returns the entropy in nats of softmax(logits / temperature), of the shape of the logits without the vocabulary.

    With logits that are sharded over the vocabulary, all ranks of the mesh dimension call it: one all-gather of three
    numbers per token combines their shards.
    """
    local = logits.to_local() if isinstance(logits, DTensor) else logits
    parts = [shard_parts(chunk, temperature) for chunk in local.flatten(0, -2).split(CHUNK)]
    top, total, product = torch.cat(parts, dim=1)
    if isinstance(logits, DTensor):
        group = logits.device_mesh.get_group(vocabulary_dim(logits))
        own = torch.stack([top, total, product])
        gathered = own.new_empty((group.size(), *own.shape))
        dist.all_gather_into_tensor(gathered.flatten(0, 1), own, group=group)
        tops, totals, products = gathered.unbind(1)
        shift = tops - tops.amax(0)
        scale = shift.exp()
        total = (scale * totals).sum(0)
        product = (scale * (products + shift * totals)).sum(0)
    entropy: Tensor = total.log() - product / total
    return entropy.view(logits.shape[:-1])


def shard_parts(logits: Tensor, temperature: float) -> Tensor:
    """Per token: the maximum m of the scaled logits z, the sum of exp(z - m), and the sum of exp(z - m) * (z - m)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    top = wide.amax(-1)
    exponentials = (wide - top[:, None]).exp()
    return torch.stack([top, exponentials.sum(-1), torch.xlogy(exponentials, exponentials).sum(-1)])


def vocabulary_dim(logits: DTensor) -> int:
    """The mesh dimension over which the vocabulary is sharded."""
    last = logits.ndim - 1
    return next(dim for dim, placement in enumerate(logits.placements) if placement.is_shard(last))


def is_vocabulary_shard(logits: DTensor) -> bool:
    """Whether logits are sharded over the vocabulary, on one mesh dimension, and not otherwise."""
    last = logits.ndim - 1
    sharded = [placement for placement in logits.placements if not placement.is_replicate()]
    return len(sharded) == 1 and sharded[0].is_shard(last)
