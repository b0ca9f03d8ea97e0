"""Memory over the operations of a trace: what a pass leaves allocated, and its peak.

A pass is added to the state before it, so that its peak does not depend on that state. In a `Repeat`, every round adds
the same, and memory is at its peak in the first or in the last round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshwright.planner.cost.trace.operations import (
    GRADIENTS,
    MEMORY_CLASSES,
    PARAMETERS,
    UNSHARDED,
    Allocate,
    Operation,
    Repeat,
)

Bytes = tuple[float, ...]
"""Bytes by class, in the order of `MEMORY_CLASSES`."""
EMPTY: Bytes = (0,) * len(MEMORY_CLASSES)


@dataclass(frozen=True)
class PassMemory:
    """What a sequence of operations does to memory, relative to the state before it."""

    change: Bytes
    """the bytes that it leaves allocated"""
    peak: Bytes
    """the bytes when the total is the largest"""
    peak_total: float
    peak_parameters: float
    """the largest bytes of parameters, sharded and unsharded, at any point"""
    peak_gradients: float
    """the largest bytes of gradients, at any point"""


class MemoryWalk:
    """Follows the memory of a rank through operations."""

    def __init__(self, state: Bytes = EMPTY) -> None:
        self.state = list(state)
        self.total: float = sum(state)
        self.peak, self.peak_total = tuple(state), self.total
        self.peak_parameters: float = state[PARAMETERS] + state[UNSHARDED]
        self.peak_gradients: float = state[GRADIENTS]

    def run(self, operations: Iterable[Operation]) -> None:
        state = self.state
        for operation in operations:
            if isinstance(operation, Allocate):
                state[operation.memory] += operation.size
                self.total += operation.size
                if operation.size > 0:
                    self._raise_peaks(operation.memory)
            elif isinstance(operation, Repeat):
                self.repeat(operation)

    def _raise_peaks(self, index: int) -> None:
        state = self.state
        if self.total > self.peak_total:
            self.peak, self.peak_total = tuple(state), self.total
        if index == GRADIENTS:
            self.peak_gradients = max(self.peak_gradients, state[GRADIENTS])
        elif index in (UNSHARDED, PARAMETERS):
            self.peak_parameters = max(self.peak_parameters, state[PARAMETERS] + state[UNSHARDED])

    def repeat(self, repeated: Repeat) -> None:
        before = tuple(self.state)
        self.run(repeated.operations)
        if repeated.times < 2:
            return
        skipped = repeated.times - 2
        if skipped:
            self.state[:] = [now + skipped * (now - then) for now, then in zip(self.state, before, strict=True)]
            self.total = sum(self.state)
        self.run(repeated.operations)

    def add(self, memory: PassMemory, times: int = 1) -> None:
        """Adds a pass whose memory is known; `times` only for passes that leave less than they need at their peak."""
        if self.total + memory.peak_total > self.peak_total:
            self.peak_total = self.total + memory.peak_total
            self.peak = tuple(now + more for now, more in zip(self.state, memory.peak, strict=True))
        parameters = self.state[PARAMETERS] + self.state[UNSHARDED]
        self.peak_parameters = max(self.peak_parameters, parameters + memory.peak_parameters)
        self.peak_gradients = max(self.peak_gradients, self.state[GRADIENTS] + memory.peak_gradients)
        self.state[:] = [now + times * more for now, more in zip(self.state, memory.change, strict=True)]
        self.total = sum(self.state)


def pass_memory(operations: Iterable[Operation]) -> PassMemory:
    """What these operations do to memory, whatever is allocated before."""
    walk = MemoryWalk()
    walk.run(operations)
    return PassMemory(tuple(walk.state), walk.peak, walk.peak_total, walk.peak_parameters, walk.peak_gradients)
