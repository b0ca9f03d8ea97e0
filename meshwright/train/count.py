"""A step under the ledgers: what it sent on every axis, and what it held of every class at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from meshwright.parallel.spread import Spread
from meshwright.record.memory import MemoryLedger
from meshwright.record.traffic import Row, TrafficLedger
from meshwright.train.optimizer import Optimizer


@dataclass
class Counted:
    """The ledgers of one step, to be read once it is over."""

    memory: MemoryLedger
    traffic: TrafficLedger

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
def counting(spread: Spread, optimizer: Optimizer, ledger: type[MemoryLedger] = MemoryLedger) -> Iterator[Counted]:
    """Everything inside is counted: several times slower where tensors are small, and, unless blocks are compiled,
    bitwise the same.
    """
    moments = [block.local for block in optimizer.moments().values()]
    copies = optimizer.owned if optimizer.offload else []
    memory = ledger(spread.outermost, [*moments, *copies], spread.held)
    with memory, TrafficLedger(spread.meshes.group_names()) as traffic:
        yield Counted(memory, traffic)
