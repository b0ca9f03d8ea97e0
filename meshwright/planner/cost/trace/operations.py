"""The operations of a step on one rank, in order: computation, communication and allocation.

A trace is a sequence of these operations. Step time, communication volume and peak memory are three walks over it:
`pass_time`, `comm_volume` and `pass_memory`. Equal consecutive blocks are one `Repeat`, so that a trace of 126 blocks
is as short as one of four; `flatten` writes it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from meshwright.base.hardware.links import GroupPlacement

MEMORY_CLASSES = ("parameters", "gradients", "optimizer", "activations", "logits", "unsharded", "communication")
"""The classes of tensors. `MemoryEstimate` has a field for each."""
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOGITS, UNSHARDED, COMMUNICATION = range(len(MEMORY_CLASSES))


class Compute(NamedTuple):
    """Computation on the device."""

    phase: str
    seconds: float


class Communicate(NamedTuple):
    """A number of equal collectives of one process group, one after the other."""

    axis: str
    collective: str
    message_bytes: float
    """the bytes of the full tensor of one call"""
    calls: float
    placement: GroupPlacement
    seconds: float
    """the time of all calls together"""
    hidden: float = 0.0
    """the part of `seconds` during which the same rank computes, because the trainer overlaps the two inside a block"""
    queue: str = ""
    """empty: computation waits for the collective; otherwise it goes on until the next `Wait` for this queue"""
    follows: bool = False
    """it reduces the result of the collective before it in the queue, and starts when that has ended"""


class Wait(NamedTuple):
    """Computation waits until all collectives of a queue that were issued before have ended."""

    queue: str


class Allocate(NamedTuple):
    """Tensors of one class are allocated, or freed if `size` is negative."""

    memory: int
    """the index of the class in `MEMORY_CLASSES`"""
    size: float


class Repeat(NamedTuple):
    """The same operations several times in a row."""

    times: int
    operations: tuple[Operation, ...]


Operation = Compute | Communicate | Wait | Allocate | Repeat
Operations = tuple[Operation, ...]


def flatten(operations: Iterable[Operation]) -> Iterator[Compute | Communicate | Wait | Allocate]:
    """The operations with every `Repeat` written out."""
    for operation in operations:
        if isinstance(operation, Repeat):
            for _ in range(operation.times):
                yield from flatten(operation.operations)
        else:
            yield operation


def collectives(operations: Iterable[Operation], times: float = 1) -> Iterator[tuple[Communicate, float]]:
    """Every collective, and how often it runs; a `Repeat` is not written out."""
    for operation in operations:
        if isinstance(operation, Repeat):
            yield from collectives(operation.operations, times * operation.times)
        elif isinstance(operation, Communicate):
            yield operation, times
