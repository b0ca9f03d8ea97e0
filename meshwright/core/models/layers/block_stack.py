"""The loop over the blocks, a module of its own so that activation checkpointing can replace it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from meshwright.core.models.layers.rotary import RotaryTables


class BlockStack(nn.Module):
    """Runs the blocks in sequence."""

    def forward(self, blocks: Iterable[nn.Module], x: Tensor, rotary: RotaryTables) -> Tensor:
        for block in blocks:
            x = block(x, rotary)
        return x
