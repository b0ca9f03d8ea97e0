"""A step under the ledgers: what it sent on every axis, and what it held of every class at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.optim.adamw import AdamW
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.telemetry.comm_counter import CollectiveTotal, CommCounter
from meshwright.telemetry.memory_tracker import MemoryTracker


@dataclass
class StepCounters:
    """The ledgers of one step, to be read once it is over."""

    memory: MemoryTracker
    traffic: CommCounter

    def enter(self, phase: str) -> None:
        self.memory.phase = phase

    def rows(self) -> list[CollectiveTotal]:
        return self.traffic.rows()

    def to_json(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "traffic": [asdict(row) for row in self.rows()],
            "memory": {
                "peak": memory.peak,
                "at_peak": memory.at_peak,
                "peak_total": memory.peak_total,
                "after": memory.current_bytes,
            },
        }


@contextmanager
def count_step(
    spread: ParallelModel, optimizer: AdamW, ledger: type[MemoryTracker] = MemoryTracker
) -> Iterator[StepCounters]:
    """Everything inside is counted: several times slower where tensors are small, and, unless blocks are compiled,
    bitwise the same.
    """
    moments = [block.local for block in optimizer.moments().values()]
    copies = optimizer.local_parameters if optimizer.offload else []
    memory = ledger(spread.wrapped_module, [*moments, *copies], spread.internal_tensors)
    with memory, CommCounter(spread.meshes.group_names()) as traffic:
        yield StepCounters(memory, traffic)
