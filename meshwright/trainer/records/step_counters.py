"""Counts one step: communication volume by mesh axis, and live tensor bytes by memory class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.optim.interface import Optimizer
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.telemetry.comm_counter import CollectiveTotal, CommCounter
from meshwright.telemetry.memory_tracker import MemoryTracker


@dataclass
class StepCounters:
    """The counters of one step, to be read once it is over."""

    memory: MemoryTracker
    communication: CommCounter

    def enter(self, phase: str) -> None:
        """Tells the memory tracker which phase of the step begins."""
        self.memory.phase = phase

    def rows(self) -> list[CollectiveTotal]:
        return self.communication.rows()

    def to_json(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "communication": [asdict(row) for row in self.rows()],
            "memory": {
                "peak": memory.peak,
                "at_peak": memory.at_peak,
                "peak_total": memory.peak_total,
                "after": memory.current_bytes,
            },
        }


def group_axes(parallel_model: ParallelModel, optimizer: Optimizer) -> dict[str, str]:
    """Returns the axis of every process group, by name."""
    return parallel_model.meshes.group_names() | optimizer.group_names()


@contextmanager
def count_step(
    parallel_model: ParallelModel, optimizer: Optimizer, tracker: type[MemoryTracker] = MemoryTracker
) -> Iterator[StepCounters]:
    """Counts everything inside. Small tensors run several times slower; results are bitwise the same unless blocks are
    compiled.
    """
    copies = [p.local for p in optimizer.optimized if optimizer.offload or p.weight is not None]
    memory = tracker(
        parallel_model.wrapped_module, [*optimizer.state_tensors(), *copies], parallel_model.internal_tensors
    )
    axes = group_axes(parallel_model, optimizer)
    with memory, CommCounter(axes) as communication:
        yield StepCounters(memory, communication)
