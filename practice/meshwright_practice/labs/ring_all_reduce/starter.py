"""Lab: ring all-reduce on send and receive. Replace every `raise NotImplementedError`, and save.

The process group exists already: dist.get_rank() and dist.get_world_size() work, and dist.send, dist.recv, dist.isend
and dist.irecv are all that you need. Collectives are not allowed.
"""

import torch.distributed as dist  # noqa: F401
from torch import Tensor


def ring_reduce_scatter(chunks: list[Tensor]) -> int:
    """Sums chunk by chunk around the ring, in place. There are as many chunks as ranks.

    After N - 1 steps, one chunk of this rank is the sum over all ranks. Returns the index of that chunk.
    """
    raise NotImplementedError


def ring_all_gather(chunks: list[Tensor], complete: int) -> None:
    """Passes complete chunks around the ring, in place, until every rank has all of them.

    `complete` is the index that ring_reduce_scatter returned.
    """
    raise NotImplementedError


def ring_all_reduce(tensor: Tensor) -> None:
    """Replaces the tensor by the sum over all ranks, in place. Its number of elements may be any."""
    raise NotImplementedError
