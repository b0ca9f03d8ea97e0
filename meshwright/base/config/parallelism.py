"""The settings of the layout of ranks, of each kind of parallelism, and of memory saved by recomputation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Literal

from meshwright.base.config.constraints import PLACEMENT, Range, nearest_multiples
from meshwright.errors import ConfigError

MAX_DEGREE = 1 << 20
"""Limit of a degree of parallelism, and of ranks in total."""
Degree = Annotated[int, Range(minimum=1, maximum=MAX_DEGREE)]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]
SPLIT_BACKWARD_SCHEDULES = ("zero-bubble", "zbv", "dualpipev")
"""The schedules that compute input and weight gradients separately."""


@dataclass(frozen=True)
class LayoutConfig:
    """Degree of each parallelism axis. Ranks = replicate x shard_degree x tensor x context x pipeline."""

    replicate: Annotated[Degree, PLACEMENT] = 2
    """data-parallel degree; with shard_degree, the number of replicas of the sharded model (HSDP)"""
    shard: Annotated[Literal["none", "optimizer", "gradients", "parameters"], PLACEMENT] = "none"
    """state that is sharded over data-parallel ranks: none (DDP), optimizer (ZeRO-1), gradients (ZeRO-2: and optimizer)
    or parameters (ZeRO-3: and both); zero-0 to zero-3 are accepted too
    """
    shard_degree: Annotated[Degree | None, PLACEMENT] = None
    """number of ranks that share one sharded replica (HSDP); unset: all data-parallel ranks, one replica"""
    tensor: Annotated[Degree, PLACEMENT] = 1
    """tensor-parallel degree, with sequence parallelism between the sharded layers"""
    pipeline: Annotated[Degree, PLACEMENT] = 1
    """pipeline-parallel degree"""
    context: Annotated[Degree, PLACEMENT] = 1
    """context-parallel degree: number of ranks that share each sequence"""
    expert: Annotated[Degree, PLACEMENT] = 1
    """expert-parallel degree; experts are sharded over existing data- and context-parallel ranks, so this adds no ranks
    """

    def __post_init__(self) -> None:
        ranks = prod((self.replicate, self.shard_degree or 1, self.tensor, self.pipeline, self.context))
        if ranks > MAX_DEGREE:
            raise ConfigError(f"the layout has {ranks:,} ranks", f"expected at most {MAX_DEGREE:,}")
        if self.shard == "none" and self.shard_degree not in (None, 1):
            raise ConfigError(
                f"layout.shard_degree = {self.shard_degree} has no effect with layout.shard = none",
                "expected layout.shard = optimizer, gradients or parameters",
            )
        if self.shard != "none" and self.shard_degree == 1:
            raise ConfigError(
                f"layout.shard = {self.shard} has no effect with layout.shard_degree = 1",
                "expected layout.shard = none, or layout.shard_degree of at least 2",
            )

    def with_ranks(self, ranks: int) -> LayoutConfig:
        """Returns this layout on a total of `ranks` ranks: `replicate` changes, the other degrees stay."""
        fixed = {"tensor": self.tensor, "shard": self.shard_degree, "pipeline": self.pipeline, "context": self.context}
        unit = prod(degree or 1 for degree in fixed.values())
        if ranks % unit:
            factors = " x ".join(f"{axis} {degree}" for axis, degree in fixed.items() if (degree or 1) > 1)
            raise ConfigError(
                f"{ranks} ranks are not divisible by {factors}", f"expected {nearest_multiples(ranks, unit)} ranks"
            )
        return replace(self, replicate=ranks // unit)


@dataclass(frozen=True)
class DDPConfig:
    """DistributedDataParallel, used if data parallelism is the only axis and nothing is sharded. Keys are torch's."""

    bucket_cap_mb: Annotated[float, Range(above=0, maximum=1e6), PLACEMENT] = 25.0
    """size of a gradient bucket in MiB; smaller buckets start communicating earlier, larger ones have less latency"""
    gradient_as_bucket_view: Annotated[bool, PLACEMENT] = True
    """let gradients be views into the buckets, which saves one copy of the gradients"""
    static_graph: Annotated[bool, PLACEMENT] = False
    """assert that every step uses the same parameters"""
    find_unused_parameters: Annotated[bool, PLACEMENT] = False
    """allow parameters that a step does not use; DDP then traverses the autograd graph every step"""
    comm_hook: Literal["none", "bf16_compress"] = "none"
    """bf16_compress all-reduces gradients in bfloat16, which halves the bytes and changes the numerics"""


@dataclass(frozen=True)
class FSDPConfig:
    """FSDP2 (fully_shard), which shards each block as one FSDP unit."""

    prefetch: Annotated[int, Range(minimum=1, maximum=64), PLACEMENT] = 1
    """number of FSDP units that are unsharded ahead of use; more hides latency and needs more memory"""
    reshard_after_forward: Annotated[bool | Annotated[int, Range(minimum=2, maximum=MAX_DEGREE)], PLACEMENT] = True
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
    """Pipeline parallelism, with the schedules of torch.distributed.pipelining."""

    schedule: Annotated[ScheduleName, PLACEMENT] = "1f1b"
    """order of forward and backward passes; zero-bubble, zbv and dualpipev fill the bubble with weight gradients"""
    stages: Annotated[Degree | None, PLACEMENT] = None
    """stages per rank; unset: one for gpipe and 1f1b, two for the other schedules"""


@dataclass(frozen=True)
class ContextConfig:
    """Context parallelism: every rank has chunks of each sequence (two with ring, one with all-to-all)."""

    method: Annotated[Literal["ring", "all-to-all"], PLACEMENT] = "ring"
    """ring passes keys and values from rank to rank, overlapped with attention (ring attention); all-to-all exchanges
    chunks of all heads for all tokens of some heads (Ulysses)
    """


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """Activation checkpointing: backward recomputes activations instead of reading them from memory."""

    mode: Annotated[Literal["none", "full", "selective"], PLACEMENT] = "none"
    """full recomputes every block; selective recomputes everything in a block except attention, reduce-scatters and
    half of the matmul results, by size
    """
    segment: Annotated[Degree, PLACEMENT] = 1
    """with mode = full: number of consecutive blocks that are recomputed together; peak memory is lowest near
    sqrt(layers x input bytes / block activation bytes)
    """
    memory_budget: Annotated[float | None, Range(minimum=0, maximum=1), PLACEMENT] = None
    """with mode = none and compiled blocks: fraction of the activation memory of a block that torch.compile may keep
    for backward; it recomputes those operators that are cheapest to recompute (activation_memory_budget of torch);
    unset: 1
    """
    offload: Annotated[bool, PLACEMENT] = False
    """with mode = full: copy the inputs of blocks to pinned host memory in forward, and back before their backward pass
    """


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile. It may change the last bits of results."""

    enabled: Annotated[bool | None, PLACEMENT] = None
    """compile the model with torch.compile; unset: true on CUDA where it is supported, false on CPU"""
    scope: Annotated[Literal["block", "model"] | None, PLACEMENT] = None
    """block compiles every block by itself, which takes seconds; model compiles the whole model, which takes longer and
    is faster for small models; unset: block; a run on one CUDA device that is long enough measures both at its start,
    and uses the faster one
    """


@dataclass(frozen=True)
class KernelsConfig:
    """The kernels of operators that have several. Each computes the same up to rounding."""

    attention: Annotated[Literal["flash", "cudnn", "efficient", "math"] | None, PLACEMENT] = None
    """backend of scaled_dot_product_attention; unset: on CUDA the one that is measured to be fastest at the start of a
    run (with precision.deterministic = true: cudnn if nvidia-cudnn-frontend is installed, otherwise flash), on CPU
    torch's choice
    """
    loss: Annotated[Literal["fused", "torch"] | None, PLACEMENT] = None
    """fused computes output projection and cross-entropy in chunks of tokens and never keeps the logits; torch computes
    both by torch's own operators; unset: fused on CUDA, torch on CPU
    """
