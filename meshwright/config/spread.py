"""The settings of how a run is spread over ranks, and of memory traded for time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Literal

from meshwright.config.kinds import PLACEMENT, Count, Range
from meshwright.errors import ConfigError

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]


@dataclass(frozen=True)
class LayoutConfig:
    """How many ranks, and along which axes."""

    replicate: Annotated[Count, PLACEMENT] = 2
    """data-parallel ranks, each with a copy of the model unless shard divides it among them"""
    shard: Annotated[Literal["none", "optimizer", "gradients", "parameters"], PLACEMENT] = "none"
    """what is divided among data-parallel ranks instead of held by each (also zero-0, zero-1, zero-2, zero-3)"""
    shard_degree: Annotated[Count | None, PLACEMENT] = None
    """ranks that one copy is divided among, with replicate such copies; unset: replicate's ranks, and one copy"""
    tensor: Annotated[Count, PLACEMENT] = 1
    """ranks that each matrix is divided among; the sequence is, between the matrices"""
    pipeline: Annotated[Count, PLACEMENT] = 1
    """ranks that the blocks are divided among, one after the other"""
    context: Annotated[Count, PLACEMENT] = 1
    """ranks that each sequence is divided among"""
    expert: Annotated[Count, PLACEMENT] = 1
    """ranks that the experts are divided among: neighbours of those that see different tokens, not ranks of its own"""

    def __post_init__(self) -> None:
        if self.shard == "none" and self.shard_degree not in (None, 1):
            raise ConfigError(
                f"layout.shard_degree = {self.shard_degree} with layout.shard = none, which divides nothing",
                "allowed: layout.shard = optimizer, gradients or parameters",
            )
        if self.shard != "none" and self.shard_degree == 1:
            raise ConfigError(
                f"layout.shard = {self.shard} with layout.shard_degree = 1 divides nothing",
                "allowed: layout.shard = none, or layout.shard_degree of at least 2",
            )

    def on(self, ranks: int) -> LayoutConfig:
        """The same on so many ranks in all: copies, or shards where they have no degree of their own, are what
        changes.
        """
        fixed = {"tensor": self.tensor, "shard": self.shard_degree, "pipeline": self.pipeline, "context": self.context}
        unit = prod(degree or 1 for degree in fixed.values())
        if ranks % unit:
            below = ranks // unit * unit
            fits = " or ".join(str(n) for n in (below, below + unit) if n)
            factors = " x ".join(f"{axis} {degree}" for axis, degree in fixed.items() if (degree or 1) > 1)
            raise ConfigError(f"{ranks} ranks do not divide over {factors}", f"allowed: {fits} ranks")
        return replace(self, replicate=ranks // unit)


@dataclass(frozen=True)
class ReplicateConfig:
    """Data parallelism by DDP."""

    bucket_mb: Annotated[float, Range(above=0, most=1e6), PLACEMENT] = 25.0
    """size of a gradient bucket; small overlaps earlier, large has less latency"""
    bucket_view: Annotated[bool, PLACEMENT] = True
    """gradients live inside the buckets: one copy less"""
    static_graph: Annotated[bool, PLACEMENT] = False
    """promise that every step uses the same parameters"""
    unused: Annotated[bool, PLACEMENT] = False
    """allow parameters that a step does not use, at the price of walking the graph each step"""
    compress: Literal["none", "bf16"] = "none"
    """reduce gradients in bf16: half the bytes, other numbers"""


@dataclass(frozen=True)
class ShardConfig:
    """Sharding by FSDP2: a unit (a block) of the model is gathered when it is used."""

    prefetch: Annotated[int, Range(least=1, most=64), PLACEMENT] = 1
    """units that are gathered ahead of use: more hides latency, and takes their memory"""
    keep: Annotated[Count | None, PLACEMENT] = None
    """shard = parameters: ranks that hold a unit together between forward and backward, such as those of one host;
    unset: all, 1: each holds it whole
    """


@dataclass(frozen=True)
class PipelineConfig:
    """Stages of blocks, through which micro-batches pass."""

    schedule: Annotated[Schedule, PLACEMENT] = "1f1b"
    """the order of forward and backward passes; zero-bubble, zbv and dualpipev put weight gradients where a rank would
    wait
    """
    stages: Annotated[Count | None, PLACEMENT] = None
    """stages a rank; unset: one for gpipe and 1f1b, two for the others"""


@dataclass(frozen=True)
class ContextConfig:
    """Sequences divided among ranks."""

    method: Annotated[Literal["ring", "all-to-all"], PLACEMENT] = "ring"
    """ring: keys and values go round, hidden behind attention; all-to-all: each rank has some heads of all tokens"""


@dataclass(frozen=True)
class ComputeConfig:
    """Time traded for memory, and memory for time."""

    recompute: Annotated[Literal["none", "full", "selective"], PLACEMENT] = "none"
    """what backward computes again: nothing, whole blocks, or all of a block but its matrix products and attention"""
    segment: Annotated[Count, PLACEMENT] = 1
    """full: blocks that are recomputed together; least is held where a segment's blocks take as much as all inputs
    kept, at the square root of layers x input / block
    """
    compile: Annotated[bool, PLACEMENT] = False
    """compile each block by torch.compile; may change the last bits"""
    offload: Annotated[bool, PLACEMENT] = False
    """keep the optimizer's state, and run the optimizer, in host memory"""
