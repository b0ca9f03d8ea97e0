"""The key-value cache: memory for the keys and values of all positions of a batch, allocated once.

The slot of a key is its position in its sequence. Sequences of different lengths begin at slot 0, so that a sequence
has the positions that it has alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.core.models.layers.rotary import RotaryEmbedding


class CachePositions:
    """The positions of the tokens of a forward pass: the same slots in every row, or one slot per row."""

    def __init__(self, start: int, tokens: int, device: torch.device, rows: Tensor | None = None) -> None:
        """`rows` has the slot of each row's only token, (batch,); without it, tokens begin at slot `start`."""
        self.start, self.end, self.rows = start, start + tokens, rows
        self.of_tokens = torch.arange(start, self.end, device=device) if rows is None else rows[:, None]


class CachedAttention(nn.Module):
    """Replaces the core of an attention: writes keys and values to the cache, and attends to all that it has."""

    def __init__(self, core: nn.Module, slots: int) -> None:
        super().__init__()
        self.core, self.slots = core, slots
        self.keys = self.values = torch.empty(0)
        self.positions: CachePositions | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        positions = self.positions
        assert positions is not None
        if not self.keys.numel():  # zeros: a slot that a row does not see must not be NaN
            self.keys = k.new_zeros(*k.shape[:2], self.slots, k.shape[3])
            self.values = v.new_zeros(*v.shape[:2], self.slots, v.shape[3])
        if positions.rows is None:
            self.keys[:, :, positions.start : positions.end] = k
            self.values[:, :, positions.start : positions.end] = v
        else:
            every_row = torch.arange(len(k), device=k.device)
            self.keys[every_row, :, positions.rows] = k[:, :, 0]
            self.values[every_row, :, positions.rows] = v[:, :, 0]
        if positions.end == q.shape[2]:  # a prompt attends to itself alone
            return self.core(q, k, v, documents)  # type: ignore[no-any-return]
        seen = self.keys[:, :, : positions.end], self.values[:, :, : positions.end]
        if positions.rows is None:
            return self.core(q, *seen, documents)  # type: ignore[no-any-return]
        return self.core(q, *seen, documents, positions.of_tokens)  # type: ignore[no-any-return]


class KeyValueCache:
    """The caches of all blocks of a model."""

    def __init__(self, attentions: list[CachedAttention]) -> None:
        self.attentions = attentions
        self.positions: CachePositions | None = None

    def move_to(self, positions: CachePositions) -> None:
        """Sets the positions of the tokens of the next forward pass."""
        self.positions = positions
        for attention in self.attentions:
            attention.positions = positions

    def repeat(self, rows: int) -> None:
        """Continues the only row of the cache as `rows` rows."""
        for attention in self.attentions:
            attention.keys = attention.keys.repeat(rows, 1, 1, 1)
            attention.values = attention.values.repeat(rows, 1, 1, 1)


@contextmanager
def with_cache(model: nn.Module, cores: Sequence[str], slots: int) -> Iterator[KeyValueCache]:
    """Gives the model a cache of `slots` positions while the block runs. `cores` are the names of its attentions."""
    cache = KeyValueCache([CachedAttention(model.get_submodule(name), slots) for name in cores])
    rotaries = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]

    def positions(_tokens: int, _device: torch.device) -> Tensor:
        assert cache.positions is not None
        return cache.positions.of_tokens

    for name, attention in zip(cores, cache.attentions, strict=True):
        replace_module(model, name, attention)
    for rotary in rotaries:
        rotary.positions = positions  # type: ignore[method-assign, assignment]
    try:
        yield cache
    finally:
        for name, attention in zip(cores, cache.attentions, strict=True):
            replace_module(model, name, attention.core)
        for rotary in rotaries:
            del rotary.positions


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
