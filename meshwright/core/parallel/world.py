"""World: the rank and device of this process, and collectives on small host values."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshwright.base.records.heartbeat import Heartbeat
from meshwright.core.telemetry.comm_counter import control_messages

if TYPE_CHECKING:
    from meshwright.base.config import LaunchConfig
    from meshwright.base.config.device_defaults import DeviceType


def device_type(launch: LaunchConfig) -> DeviceType:
    """The kind of device that ranks use. `device_count` asks NVML: `is_available` would initialize CUDA, which ranks
    that are forked from this process could then not use.
    """
    if launch.device == "auto":
        return "cuda" if torch.cuda.device_count() else "cpu"
    return launch.device


@dataclass(frozen=True)
class World:
    """One rank of a job. With one rank there is no process group; with several, host tensors use Gloo and device
    tensors use the backend of the device.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    hosts: tuple[str, ...] = ()
    """the host of each rank; known on rank 0 only"""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies asynchronously. The tensor is pinned first, since a copy from pageable memory blocks the host."""
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def all_reduce(self, tensor: torch.Tensor, name: str = "sum") -> PendingAllReduce:
        """Starts an in-place sum of a small tensor over all ranks; `wait` returns it. Host tensors stay on the host."""
        self.heartbeat.collective(name)
        if self.size == 1:
            return PendingAllReduce(tensor, None, self.heartbeat)
        with control_messages():
            return PendingAllReduce(tensor, dist.all_reduce(tensor, async_op=True), self.heartbeat)

    def all_reduce_ints(self, *numbers: int, name: str) -> PendingAllReduce:
        return self.all_reduce(torch.tensor(numbers, dtype=torch.int64), name)

    def all_gather_ints(self, *numbers: int, name: str) -> list[list[int]]:
        """The numbers of every rank, by rank."""
        rows = torch.zeros(self.size, len(numbers), dtype=torch.int64)
        rows[self.rank] = torch.tensor(numbers, dtype=torch.int64)
        return self.all_reduce(rows, name).wait().tolist()

    def all_gather_array(self, array: torch.Tensor, name: str) -> list[torch.Tensor]:
        """The host array of every rank, by rank. The arrays have one dimension and may have different lengths."""
        lengths = [length for (length,) in self.all_gather_ints(len(array), name=name)]
        start = sum(lengths[: self.rank])
        joined = torch.zeros(sum(lengths), dtype=array.dtype)
        joined[start : start + len(array)] = array
        return list(self.all_reduce(joined, name).wait().split(lengths))

    def broadcast_object(self, value: Any, name: str, src: int = 0) -> Any:
        """Sends a JSON value from rank `src` to all ranks."""
        text = json.dumps(value).encode() if self.rank == src else b""
        length = int(self.all_reduce_ints(len(text), name=name).wait())
        payload = torch.zeros(length, dtype=torch.uint8)
        if self.rank == src:
            payload[:] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return json.loads(self.all_reduce(payload, name).wait().numpy().tobytes())


@dataclass
class PendingAllReduce:
    """An all-reduce in flight."""

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
