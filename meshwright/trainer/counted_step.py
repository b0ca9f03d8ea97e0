"""A step under the ledgers: what it sent on every axis, and what it held of every class at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.optim.adamw import Optimizer
from meshwright.parallel.parallel_model import ParallelModel
from meshwright.telemetry.comm_counter import CommCounter, Row
from meshwright.telemetry.memory_tracker import MemoryTracker


@dataclass
class Counted:
    """The ledgers of one step, to be read once it is over."""

    memory: MemoryTracker
    traffic: CommCounter

    def enter(self, phase: str) -> None:
        self.memory.phase = phase

    def rows(self) -> list[Row]:
        return self.traffic.rows()

    def to_json(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "traffic": [asdict(row) for row in self.rows()],
            "memory": {
                "peak": memory.peak,
                "at_peak": memory.at_peak,
                "peak_total": memory.peak_total,
                "after": memory.now,
            },
        }


@contextmanager
def counting(
    spread: ParallelModel, optimizer: Optimizer, ledger: type[MemoryTracker] = MemoryTracker
) -> Iterator[Counted]:
    """Everything inside is counted: several times slower where tensors are small, and, unless blocks are compiled,
    bitwise the same.
    """
    moments = [block.local for block in optimizer.moments().values()]
    copies = optimizer.owned if optimizer.offload else []
    memory = ledger(spread.outermost, [*moments, *copies], spread.held)
    with memory, CommCounter(spread.meshes.group_names()) as traffic:
        yield Counted(memory, traffic)
