"""Collectives built from sends and receives: the ring, a tree, and a central server. Every send is one message.

A vector of D bytes has one chunk per rank. In a ring of n ranks every rank sends to its successor alone.

| algorithm | rounds | bytes that the busiest rank sends |
|---|---|---|
| ring reduce-scatter, ring all-gather | n - 1 | (n - 1) / n D |
| ring all-reduce: the one, then the other | 2 (n - 1) | 2 (n - 1) / n D |
| binary tree all-reduce: up and down | 2 log2 n | at most 2 D, the sum over ranks is 2 (n - 1) D |
| central server | 2 | (n - 1) D |
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(sent: Tensor | None, to: int, received: Tensor | None, source: int) -> None:
    """Sends one tensor and receives another at the same time."""
    works = []
    if sent is not None:
        works.append(dist.isend(sent.contiguous(), to))
    if received is not None:
        works.append(dist.irecv(received, source))
    for work in works:
        assert work is not None
        work.wait()


def ring_reduce_scatter(vector: Tensor) -> tuple[Tensor, int]:
    """(this rank's chunk of the sum, rounds). A chunk travels once around the ring and collects every rank's share."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = [chunk.clone() for chunk in vector.chunk(ranks)]
    for step in range(ranks - 1):
        out, into = (rank - step - 1) % ranks, (rank - step - 2) % ranks
        received = torch.empty_like(chunks[into])
        exchange(chunks[out], (rank + 1) % ranks, received, (rank - 1) % ranks)
        chunks[into] += received
    return chunks[rank], ranks - 1


def ring_all_gather(chunk: Tensor) -> tuple[Tensor, int]:
    """(all chunks in order, rounds)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = [torch.empty_like(chunk) for _ in range(ranks)]
    chunks[rank] = chunk.clone()
    for step in range(ranks - 1):
        out, into = (rank - step) % ranks, (rank - step - 1) % ranks
        exchange(chunks[out], (rank + 1) % ranks, chunks[into], (rank - 1) % ranks)
    return torch.cat(chunks), ranks - 1


def ring_all_reduce(vector: Tensor) -> tuple[Tensor, int]:
    chunk, first = ring_reduce_scatter(vector)
    gathered, second = ring_all_gather(chunk)
    return gathered, first + second


def tree_all_reduce(vector: Tensor) -> tuple[Tensor, int]:
    """Sums towards rank 0 along a binary tree and sends the sum back. The number of ranks is a power of two."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total, strides = vector.clone(), [1 << level for level in range(ranks.bit_length() - 1)]
    for stride in strides:
        if rank % (2 * stride) == stride:
            exchange(total, rank - stride, None, 0)
        elif rank % (2 * stride) == 0:
            received = torch.empty_like(total)
            exchange(None, 0, received, rank + stride)
            total += received
    for stride in reversed(strides):
        if rank % (2 * stride) == 0:
            exchange(total, rank + stride, None, 0)
        elif rank % (2 * stride) == stride:
            exchange(None, 0, total, rank - stride)
    return total, 2 * len(strides)


def server_all_reduce(vector: Tensor) -> tuple[Tensor, int]:
    """Rank 0 receives every vector and sends the sum to everyone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    total = vector.clone()
    if rank == 0:
        for source in range(1, ranks):
            received = torch.empty_like(total)
            exchange(None, 0, received, source)
            total += received
        for other in range(1, ranks):
            exchange(total, other, None, 0)
    else:
        exchange(total, 0, None, 0)
        exchange(None, 0, total, 0)
    return total, 2
