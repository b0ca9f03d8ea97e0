"""The sizes of the blocks in which a run reads and writes. They are no user settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of the blocks in which a run reads and writes; results do not depend on them. `prove` makes them small, so
    that a small run crosses the borders of blocks.
    """

    loader_positions: int = 4096
    """Positions of the stream that the loader permutes in one call: a vectorized permutation costs about the same for
    16 positions as for 1000.
    """
    io_bytes: int = 1 << 20
    """Bytes of a shard that are copied and then hashed at a time: few enough to remain in the CPU cache in between."""
    digest_bytes: int = 8 << 20
    """Bytes of a shard that one digest of the manifest covers."""


BLOCK_SIZES = BlockSizes()
"""The block sizes of every run outside of `prove`."""
