"""What a step sees of a model that is spread over ranks: forward, backward, and when gradients meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from meshwright.models.experts import Router
from meshwright.parallel.mesh import Meshes
from meshwright.parallel.tensor_parallel import reduce_partial_gradients

ShardInputs = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


@dataclass
class GradientReduction:
    """What DDP's reduction of one step sent, and the square of this rank's own gradient before it met the others."""

    buckets: int = 0
    message_bytes: int = 0
    local_square: Tensor | None = None


def stateful_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Those that a forward pass may change, differently on ranks with other tokens. A router's bias is moved by the
    step, alike on all ranks.
    """
    for part in module.modules():
        if not isinstance(part, Router):
            yield from part.buffers(recurse=False)


def router_biases(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that no pass changes: routers' biases, which all ranks move alike, or one of them is wrong."""
    for name, part in module.named_modules():
        if isinstance(part, Router):
            yield f"{name}.bias", part.bias


class ParallelModel:
    """A module after all axes were applied. After the last micro-step every gradient is the sum over the ranks that
    see other tokens. This one is not spread over tokens at all; each way of doing so is a subclass.
    """

    meshes = Meshes(None)
    has_loss = True
    """whether this rank computes a loss, or only a part of the way there"""
    copies: frozenset[str] = frozenset()
    """parameters that follow another's value and are nobody's to update or to keep"""
    zero_in_place = False
    """whether gradients of micro-steps that do not meet would lie beside a buffer that is there anyway"""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.groups: list[dist.ProcessGroup] = []
        """of ranks that see other tokens, the outermost axis last"""
        self.on_last_bucket: Callable[[], object] = lambda: None
        self.take: ShardInputs = lambda inputs: inputs
        """what this rank is given of a micro-batch"""

    @property
    def forward_is_collective(self) -> bool:
        """Whether a pass through the model is made by several ranks, none of which can make it alone."""
        return self.meshes.dense_mesh is not None or self.meshes.context_group is not None

    def parameters(self) -> dict[str, nn.Parameter]:
        """What this rank has to update and to keep, as it is between steps."""
        return {name: p for name, p in self.module.named_parameters() if name not in self.copies}

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.module(*inputs)  # type: ignore[no-any-return]

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Forward and backward go inside; after the last, gradients have met."""
        tensor = self.meshes.submesh("tensor")
        if tensor is None:
            yield
            return
        with loss_parallel():  # a loss over a cut vocabulary, in backward too
            yield
        if last:
            reduce_partial_gradients(self.module.parameters(), tensor)

    def forward_loss(self, *inputs: Tensor) -> Tensor:
        """The sum of losses by a forward pass alone."""
        total, _ = self.module(*inputs)
        return total  # type: ignore[no-any-return]

    def after_update(self) -> None:
        """Parameters have new values."""

    def broadcast_buffers(self) -> None:
        """Those of the first rank are the run's: ranks that read other samples would come to others."""
        for buffer in stateful_buffers(self.module):
            for group in self.groups:
                dist.broadcast(buffer, group=group, group_src=0)

    @property
    def wrapped_module(self) -> nn.Module:
        """The module that is called."""
        return self.module

    def internal_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """(class, tensor) of what the module itself does not show: gathered parameters, buckets of gradients."""
        return ()

    def reshard(self) -> None:
        """Lets go of what was gathered, where somebody looked at the model between steps."""

    def pop_gradient_reduction(self) -> GradientReduction:
        """What was sent since the last call, where this way of spreading counts it at every step."""
        return GradientReduction()
