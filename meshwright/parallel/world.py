"""This process's place in the job: its rank, its device, and the sums it takes part in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """With one rank there is no process group at all; with several, host tensors travel by Gloo and device tensors by
    the device's backend.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a small device tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def control_sum(self, numbers: list[int]) -> ControlSum:
        """Starts summing a few host numbers over all ranks, without the device; `wait` gives the sums."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        work = dist.all_reduce(tensor, async_op=True) if self.size > 1 else None
        return ControlSum(tensor, work)


@dataclass
class ControlSum:
    tensor: torch.Tensor
    work: dist.Work | None

    def wait(self) -> list[int]:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return [int(value) for value in self.tensor]
