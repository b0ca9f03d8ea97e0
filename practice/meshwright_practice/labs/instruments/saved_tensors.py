"""Counts the bytes of tensors that autograd saves for backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class SavedTensors:
    """The storages that were saved, once each: their bytes, and the largest one."""

    storages: dict[int, int] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)
    """keeps storages alive, so that their addresses stay unique"""

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())

    @property
    def largest(self) -> int:
        return max(self.storages.values(), default=0)

    def add(self, tensor: Tensor) -> Tensor:
        self.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        self._kept.append(tensor.detach())
        return tensor


@contextmanager
def saved_tensors() -> Iterator[SavedTensors]:
    """Counts what is saved by the forward pass inside a `with` block."""
    saved = SavedTensors()
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        yield saved
