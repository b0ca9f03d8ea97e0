"""The axes of parallelism in one table: names, order, and which of them split the global batch. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """One axis of parallelism."""

    name: str
    config_key: str
    """the key of a run file that sets its degree"""
    description: str
    reads_different_samples: bool = False
    """whether ranks that differ on this axis read different samples of the global batch"""
    has_own_ranks: bool = True
    """whether the axis multiplies the number of ranks; expert parallelism reuses the ranks of other axes"""


AXIS_TABLE = (
    Axis("pipeline", "layout.pipeline", "consecutive blocks are divided into stages"),
    Axis("replicate", "layout.replicate", "every rank holds a full replica", reads_different_samples=True),
    Axis(
        "shard",
        "layout.shard_degree",
        "optimizer state, gradients or parameters are sharded (ZeRO-1, 2, 3)",
        reads_different_samples=True,
    ),
    Axis("context", "layout.context", "every sequence is divided into chunks"),
    Axis("tensor", "layout.tensor", "every weight matrix is divided, and the sequence between matrices"),
    Axis(
        "expert",
        "layout.expert",
        "the experts of every mixture-of-experts layer are divided",
        has_own_ranks=False,
    ),
)
"""The outermost axis comes first. Consecutive ranks are neighbours on the innermost axis with ranks of its own, so the
axis that communicates most has the fastest links.
"""

AXES = tuple(axis.name for axis in AXIS_TABLE if axis.has_own_ranks)
"""Axes that multiply the number of ranks, outermost first: the dimensions of the mesh."""

ALL_AXES = tuple(axis.name for axis in AXIS_TABLE)
"""`AXES` and the expert axis."""

DATA_AXES = tuple(axis.name for axis in AXIS_TABLE if axis.reads_different_samples)
"""Axes that split the global batch."""
