"""The settings of how a run is spread over ranks, and of memory traded for time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Literal

from meshwright.config.constraints import PLACEMENT, PositiveInt, Range
from meshwright.errors import ConfigError

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]


@dataclass(frozen=True)
class LayoutConfig:
    """How many ranks, and along which axes."""

    replicate: Annotated[PositiveInt, PLACEMENT] = 2
    """data-parallel ranks, each with a copy of the model unless shard divides it among them"""
    shard: Annotated[Literal["none", "optimizer", "gradients", "parameters"], PLACEMENT] = "none"
    """what is divided among data-parallel ranks instead of held by each (also zero-0, zero-1, zero-2, zero-3)"""
    shard_degree: Annotated[PositiveInt | None, PLACEMENT] = None
    """ranks that one copy is divided among, with replicate such copies; unset: replicate's ranks, and one copy"""
    tensor: Annotated[PositiveInt, PLACEMENT] = 1
    """ranks that each matrix is divided among; the sequence is, between the matrices"""
    pipeline: Annotated[PositiveInt, PLACEMENT] = 1
    """ranks that the blocks are divided among, one after the other"""
    context: Annotated[PositiveInt, PLACEMENT] = 1
    """ranks that each sequence is divided among"""
    expert: Annotated[PositiveInt, PLACEMENT] = 1
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

    def with_ranks(self, ranks: int) -> LayoutConfig:
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
class DDPConfig:
    """DistributedDataParallel, which runs where every rank holds a full copy of the model. Keys are torch's."""

    bucket_cap_mb: Annotated[float, Range(above=0, maximum=1e6), PLACEMENT] = 25.0
    """size of a gradient bucket in MiB; smaller buckets start communicating earlier, larger ones have less latency"""
    gradient_as_bucket_view: Annotated[bool, PLACEMENT] = True
    """let gradients be views into the buckets, which saves one copy of the gradients"""
    static_graph: Annotated[bool, PLACEMENT] = False
    """assert that every step uses the same parameters"""
    find_unused_parameters: Annotated[bool, PLACEMENT] = False
    """allow parameters that a step does not use; DDP then traverses the autograd graph every step"""
    comm_hook: Literal["none", "bf16_compress"] = "none"
    """bf16_compress all-reduces gradients in bfloat16: half of the bytes, different numerics"""


@dataclass(frozen=True)
class FSDPConfig:
    """FSDP2 (fully_shard), which shards each block as one FSDP unit."""

    prefetch: Annotated[int, Range(minimum=1, maximum=64), PLACEMENT] = 1
    """FSDP units that are unsharded ahead of use; more hides latency and takes more memory"""
    reshard_after_forward: Annotated[bool | Annotated[int, Range(minimum=2)], PLACEMENT] = True
    """with shard = parameters: true reshards to all ranks after forward, false keeps parameters unsharded until
    backward, a number N reshards to groups of N ranks, such as those of one host
    """

    @property
    def ranks_after_forward(self) -> int | None:
        """The ranks that share an FSDP unit between forward and backward; None: all ranks of the shard group."""
        if self.reshard_after_forward is True:
            return None
        return int(self.reshard_after_forward) or 1


@dataclass(frozen=True)
class PipelineConfig:
    """Stages of blocks, through which micro-batches pass."""

    schedule: Annotated[ScheduleName, PLACEMENT] = "1f1b"
    """the order of forward and backward passes; zero-bubble, zbv and dualpipev put weight gradients where a rank would
    wait
    """
    stages: Annotated[PositiveInt | None, PLACEMENT] = None
    """stages a rank; unset: one for gpipe and 1f1b, two for the others"""


@dataclass(frozen=True)
class ContextConfig:
    """Sequences divided among ranks."""

    method: Annotated[Literal["ring", "all-to-all"], PLACEMENT] = "ring"
    """ring: keys and values go round, hidden behind attention; all-to-all: each rank has some heads of all tokens"""


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """Activation checkpointing: backward recomputes activations instead of reading them from memory."""

    mode: Annotated[Literal["none", "full", "selective"], PLACEMENT] = "none"
    """none; full: every block; selective: everything in a block except matrix products and attention"""
    segment: Annotated[PositiveInt, PLACEMENT] = 1
    """with mode = full: consecutive blocks that are recomputed together; peak memory is lowest near
    sqrt(layers x input bytes / block activation bytes)
    """


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile."""

    enabled: Annotated[bool, PLACEMENT] = False
    """compile each block with torch.compile; may change the last bits"""
