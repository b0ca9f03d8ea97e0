"""Counts one step: communication volume by mesh axis, and live tensor bytes by memory class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from meshwright.core.fake_operators import RunOperator, run_operator
from meshwright.core.optim.interface import Optimizer
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.telemetry.comm_counter import CollectiveTotal, CommCounter, CountingMode
from meshwright.core.telemetry.memory_tracker import MemoryTracker
from meshwright.core.torch_private import TorchDispatchMode


@dataclass
class StepCounters:
    """The counters of one step, to be read once it is over."""

    memory: MemoryTracker
    communication: CommCounter
    device: torch.device
    compiled: bool = False
    """whether compiled code allocates tensors that the tracker does not see"""
    allocated_peak: int = 0
    """the peak of CUDA's allocator in a step with compiled code"""

    def enter(self, phase: str) -> None:
        """Tells the memory tracker which phase of the step begins."""
        self.memory.phase = phase

    def rows(self) -> list[CollectiveTotal]:
        return self.communication.rows()

    @property
    def unseen_bytes(self) -> int:
        """The bytes at the peak that the tracker has not seen: CUDA's allocator counts them, and CPU's does not."""
        return max(0, self.allocated_peak - self.memory.peak_total)

    @property
    def peak_total(self) -> int:
        return self.memory.peak_total + self.unseen_bytes

    def to_json(self) -> dict[str, Any]:
        memory, unseen = self.memory, {"activation": self.unseen_bytes}
        record = {
            "peak": {name: size + unseen.get(name, 0) for name, size in memory.peak.items()},
            "at_peak": {name: size + unseen.get(name, 0) for name, size in memory.at_peak.items()},
            "peak_total": self.peak_total,
            "after": memory.current_bytes,
        }
        if self.compiled and self.device.type == "cpu":
            record["excluded"] = "what compiled code allocates"
        return {"communication": [asdict(row) for row in self.rows()], "memory": record}


class CountedOperators(CountingMode):
    """Counts communication and memory in one dispatch mode, which takes less time than two."""

    def __init__(self, memory: MemoryTracker, communication: CommCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.communication = memory, communication

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: RunOperator = run_operator) -> Any:
        return self.memory.observe(func, args, kwargs, partial(self.communication.observe, run=run))


def group_axes(parallel_model: ParallelModel, optimizer: Optimizer) -> dict[str, str]:
    """Returns the axis of every process group, by name."""
    return parallel_model.meshes.group_names() | optimizer.group_names()


@contextmanager
def count_step(
    parallel_model: ParallelModel,
    optimizer: Optimizer,
    tracker: type[MemoryTracker] = MemoryTracker,
    compiled: bool = False,
    mode: Callable[[CountedOperators], TorchDispatchMode] = lambda counted: counted,
) -> Iterator[StepCounters]:
    """Counts everything inside. Small tensors run several times slower; results are bitwise the same. What compiled
    code allocates counts as activations, by the statistics of CUDA's allocator. `mode` makes the dispatch mode that
    calls the counters.
    """
    copies = [p.local for p in optimizer.optimized if optimizer.offload or p.weight is not None]
    memory = tracker(
        parallel_model.wrapped_module, [*optimizer.state_tensors(), *copies], parallel_model.internal_tensors
    )
    axes, device = group_axes(parallel_model, optimizer), optimizer.world.device
    asks_allocator = compiled and device.type == "cuda"
    if asks_allocator:
        torch.cuda.reset_peak_memory_stats(device)
    communication = CommCounter(axes)
    memory.begin()
    try:
        with mode(CountedOperators(memory, communication)):
            counters = StepCounters(memory, communication, device, compiled)
            yield counters
    finally:
        memory.end()
    if asks_allocator:
        counters.allocated_peak = torch.cuda.max_memory_allocated(device)
