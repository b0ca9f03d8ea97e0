"""Moves a user's weights to memory that the ranks share with this process, so that rank 0 can return them trained."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError

SHARED_MEMORY = "/dev/shm"
"""The file system behind torch's shared memory; 64 MB in a Docker container unless --shm-size says otherwise."""


def share_weights(modules: Iterable[nn.Module], spawned: bool) -> None:
    """Moves parameters and buffers to shared memory. Forked ranks inherit an anonymous mapping, which needs no space in
    /dev/shm; spawned ranks need torch's shared memory, which is refused if it does not fit.
    """
    modules = list(modules)
    tensors = [tensor for module in modules for tensor in chain(module.parameters(), module.buffers())]
    if not spawned:
        share_with_forks(tensors)
        return
    unshared = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_shared()}
    needed, free = sum(unshared.values()), free_shared_memory()
    if needed > free:
        raise ConfigError(
            f"the weights of the model need {needed / 1e6:.0f} MB of shared memory, and {SHARED_MEMORY} has "
            f"{free / 1e6:.0f} MB free",
            "try docker run --shm-size=..., or call train before anything initializes CUDA: it then needs none",
        )
    for module in modules:
        module.share_memory()


@torch.no_grad()
def share_with_forks(tensors: Iterable[Tensor]) -> None:
    """Moves CPU tensors to anonymous shared mappings, in place; tensors that share a storage still share it."""
    shared: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or storage.nbytes() == 0 or tensor.is_shared():
            continue
        if storage.data_ptr() not in shared:
            mapping = torch.frombuffer(mmap.mmap(-1, storage.nbytes()), dtype=torch.uint8).untyped_storage()
            mapping.copy_(storage, non_blocking=False)
            shared[storage.data_ptr()] = mapping
            shared[mapping.data_ptr()] = mapping  # a tensor of two modules is visited twice and moved once
        mapping = shared[storage.data_ptr()]
        if mapping.data_ptr() != storage.data_ptr():
            view = torch.empty(0, dtype=tensor.dtype)
            tensor.data = view.set_(mapping, tensor.storage_offset(), tensor.shape, tensor.stride())


def free_shared_memory() -> int:
    """Free bytes in /dev/shm; a host without it has no such limit."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 1 << 62
    return status.f_bavail * status.f_frsize
