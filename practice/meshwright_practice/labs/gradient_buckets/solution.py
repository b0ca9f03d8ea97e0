"""Lab: gradient buckets with overlap. The reference solution."""

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


@dataclass
class ReducedBucket:
    """A bucket during one backward."""

    parameters: list[Parameter]
    missing: int
    """gradients that are not ready yet"""
    flat: Tensor = field(default_factory=lambda: torch.empty(0))
    work: dist.Work | None = None

    def start(self) -> None:
        """Starts the all-reduce; backward goes on meanwhile."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.flat = torch.cat([gradient.view(-1) for gradient in gradients])
        self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self) -> None:
        if self.work is None:  # a parameter of this bucket, or of one before it, was not used: its hook never ran
            self.start()
        if self.work is not None:
            self.work.wait()
        mean = self.flat / dist.get_world_size()
        for parameter, part in zip(self.parameters, mean.split([p.numel() for p in self.parameters]), strict=True):
            if parameter.grad is None:  # another rank may have used it, and all ranks make the same update
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(part.view_as(parameter))
        self.missing, self.flat, self.work = len(self.parameters), torch.empty(0), None


def make_buckets(parameters: list[Parameter], bucket_bytes: int) -> list[list[Parameter]]:
    """Groups parameters in reverse order, the order in which backward completes their gradients."""
    buckets: list[list[Parameter]] = [[]]
    size = 0
    for parameter in reversed(parameters):
        if buckets[-1] and size + parameter.nbytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.nbytes
    return buckets


def attach_hooks(buckets: list[list[Parameter]]) -> list[ReducedBucket]:
    """One countdown per bucket, driven by the hooks of its parameters."""
    state = [ReducedBucket(parameters, len(parameters)) for parameters in buckets]
    for bucket in state:
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(partial(on_gradient, state, bucket))
    return state


def on_gradient(state: list[ReducedBucket], bucket: ReducedBucket, _: Tensor) -> None:
    """Starts the buckets that are ready, up to the first that is not. A collective meets the one that the other ranks
    start next, whatever is in it: a bucket that is ready early waits for those before it, on every rank.
    """
    bucket.missing -= 1
    for each in state:
        if each.missing:
            break
        if each.work is None:
            each.start()


def finish(state: list[ReducedBucket]) -> None:
    """Starts what is left and waits, in the order of the buckets: the first are copied back while the last are on their
    way.
    """
    for bucket in state:
        bucket.finish()
