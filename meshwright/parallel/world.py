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

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that the host does not wait for; from pageable memory it would wait for all that is queued before."""
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def sum(self, tensor: torch.Tensor) -> Summing:
        """Starts summing a small tensor over all ranks, in place; `wait` gives it. A host tensor stays on the host."""
        return Summing(tensor, dist.all_reduce(tensor, async_op=True) if self.size > 1 else None)

    def sum_numbers(self, *numbers: int) -> Summing:
        return self.sum(torch.tensor(numbers, dtype=torch.int64))


@dataclass
class Summing:
    """A sum over ranks that is on its way."""

    tensor: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.tensor
