"""Assumes that the ring has four ranks. Expected check: 3 ranks return."""

import torch
import torch.distributed as dist


def exchange(send, receive):
    rank = dist.get_rank()
    work = dist.isend(send, (rank + 1) % 4)
    dist.recv(receive, (rank - 1) % 4)
    work.wait()


def ring_reduce_scatter(chunks):
    rank = dist.get_rank()
    for step in range(3):
        received = torch.empty_like(chunks[(rank - step - 1) % 4])
        exchange(chunks[(rank - step) % 4], received)
        chunks[(rank - step - 1) % 4] += received
    return (rank + 1) % 4


def ring_all_gather(chunks, complete):
    for step in range(3):
        exchange(chunks[(complete - step) % 4], chunks[(complete - step - 1) % 4])


def ring_all_reduce(tensor):
    chunks = list(tensor.view(-1).tensor_split(4))
    ring_all_gather(chunks, ring_reduce_scatter(chunks))
