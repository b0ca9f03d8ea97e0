"""This process's place in the job: its rank, its device, and the sums it takes part in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from meshwright.telemetry.comm_counter import control_traffic
from meshwright.telemetry.heartbeat import Heartbeat


@dataclass(frozen=True)
class World:
    """With one rank there is no process group at all; with several, host tensors travel by Gloo and device tensors by
    the device's backend.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    hosts: tuple[str, ...] = ()
    """where each rank runs; rank 0 alone knows"""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that the host does not wait for; from pageable memory it would wait for all that is queued before."""
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def all_reduce(self, tensor: torch.Tensor, name: str = "sum") -> PendingAllReduce:
        """Starts summing a small tensor over all ranks, in place; `wait` gives it. A host tensor stays on the host."""
        self.heartbeat.collective(name)
        if self.size == 1:
            return PendingAllReduce(tensor, None, self.heartbeat)
        with control_traffic():
            return PendingAllReduce(tensor, dist.all_reduce(tensor, async_op=True), self.heartbeat)

    def all_reduce_ints(self, *numbers: int, name: str) -> PendingAllReduce:
        return self.all_reduce(torch.tensor(numbers, dtype=torch.int64), name)

    def all_gather_ints(self, *numbers: int, name: str) -> list[list[int]]:
        """Every rank's numbers, by rank."""
        own = torch.zeros(self.size, len(numbers), dtype=torch.int64)
        own[self.rank] = torch.tensor(numbers, dtype=torch.int64)
        return self.all_reduce(own, name).wait().tolist()

    def broadcast_object(self, value: Any, name: str, speaker: int = 0) -> Any:
        """What one rank gives here, as JSON, on every rank."""
        text = json.dumps(value).encode() if self.rank == speaker else b""
        length = int(self.all_reduce_ints(len(text), name=name).wait())
        carried = torch.zeros(length, dtype=torch.uint8)
        if self.rank == speaker:
            carried[:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return json.loads(self.all_reduce(carried, name).wait().numpy().tobytes())


@dataclass
class PendingAllReduce:
    """A sum over ranks that is on its way."""

    tensor: torch.Tensor
    work: dist.Work | None
    heartbeat: Heartbeat

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.heartbeat.set_waiting(True)
            self.work.wait()
            self.heartbeat.set_waiting(False)
            self.work = None
        return self.tensor
