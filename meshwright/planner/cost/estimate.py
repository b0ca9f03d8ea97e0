"""The estimate of one job: memory per rank, step time by phase, and the cost of every collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

from meshwright.planner.workload.planned_job import PlannedJob

PINNED_SLACK = 0.25
"""The fraction of the allocator's slack that it cannot return, because live tensors share its blocks."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank when its memory use in a step is at its peak, by class."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    """the optimizer state: moments and master weights"""
    activations: float = 0
    """the activations of all micro-batches in flight"""
    logits: float = 0
    unsharded: float = 0
    """the parameters that FSDP holds unsharded at that point"""
    communication: float = 0
    """buffers of collectives and of pipeline sends and receives"""
    slack: float = 0
    """memory that the caching allocator reserves beyond its live tensors"""
    context: float = 0
    """the device context: kernels, library handles and communicators"""
    rank: int = field(default=0, kw_only=True)
    """the pipeline rank"""

    @property
    def tensors(self) -> float:
        """Bytes of live tensors, as a tensor tracker counts them (torch's peak allocated)."""
        model = self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.unsharded
        return model + self.communication

    @property
    def reserved(self) -> float:
        """Bytes that the caching allocator takes from the device (torch's peak reserved)."""
        return self.tensors + self.slack

    @property
    def total(self) -> float:
        """Bytes in use on the device (as nvidia-smi shows)."""
        return self.reserved + self.context

    @property
    def required(self) -> float:
        """Bytes without which the step runs out of memory: before it gives up, the caching allocator returns free
        blocks to the device, which is most of its slack.
        """
        return self.tensors + self.context + PINNED_SLACK * self.slack


@dataclass(frozen=True)
class CollectiveCost:
    """One kind of collective that a rank takes part in, over a whole step."""

    axis: str
    collective: str
    message_bytes: float
    """the bytes of the full tensor of one call"""
    calls: float
    """the number of calls per step"""
    ranks: int
    link: str
    """whether the group communicates inside a node or between nodes"""
    seconds: float
    """the time of all calls together"""
    exposed_seconds: float
    """the share of `seconds` that is not overlapped with computation"""


class CollectiveCosts(Sequence[CollectiveCost]):
    """The collectives of a step, counted when they are first read: a search reads those of few candidates."""

    def __init__(self, count: Callable[[], list[CollectiveCost]]) -> None:
        self._count = count

    @cached_property
    def _costs(self) -> list[CollectiveCost]:
        return self._count()

    @overload
    def __getitem__(self, index: int) -> CollectiveCost: ...
    @overload
    def __getitem__(self, index: slice) -> list[CollectiveCost]: ...
    def __getitem__(self, index: int | slice) -> CollectiveCost | list[CollectiveCost]:
        return self._costs[index]

    def __len__(self) -> int:
        return len(self._costs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._costs == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Estimate:
    """The memory, the step time and the communication of a job."""

    job: PlannedJob
    memory_by_rank: list[MemoryEstimate]
    """the peak memory of each pipeline rank; of a candidate of the search, those that may need most"""
    phases: dict[str, float]
    """exposed seconds of one step on the slowest rank, by phase; they add up to `seconds`"""
    calls: Sequence[CollectiveCost]
    interval_low: float
    interval_high: float
    """the ends of the 80 % interval of the step time, in seconds"""
    main_uncertainty: str
    """the assumption that contributes most to the width of the interval"""
    model_flops: float
    """FLOPs of a step over all devices: matrix products and the causal half of attention, without recomputation"""
    hardware_flops: float
    """`model_flops` plus the FLOPs of recomputation"""
    peak_precision: str
    """the precision of most of `model_flops`, to whose peak MFU and HFU relate"""
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def peak_memory(self) -> MemoryEstimate:
        """The memory of the pipeline rank that needs most."""
        return max(self.memory_by_rank, key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        return self.peak_memory.total <= self.job.cluster.device.memory

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float:
        return self.model_flops / self.seconds / self.peak_flops

    @property
    def hfu(self) -> float:
        return self.hardware_flops / self.seconds / self.peak_flops

    @property
    def peak_flops(self) -> float:
        """The peak FLOP/s of all devices of the job together, in the precision of most FLOPs."""
        rates = self.job.cluster.device.peak_flops
        return rates.get(self.peak_precision, rates["bf16"]) * self.job.layout.ranks
