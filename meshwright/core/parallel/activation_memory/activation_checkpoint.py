"""Activation checkpointing: backward recomputes activations instead of reading them from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.base.config import ActivationCheckpointConfig
from meshwright.core.models.layers.block_stack import BlockStack
from meshwright.core.models.layers.rotary import RotaryTables
from meshwright.core.parallel.parallel_spec import ParallelSpec, find_blocks
from meshwright.core.parallel.pipeline_parallel.stand_ins import StandIn
from meshwright.errors import ConfigError

MATMULS = ("mm", "bmm", "addmm", "linear", "_grouped_mm", "_scaled_mm")
"""Matrix products. Those with the inputs of a block are equally expensive to compute per byte of their result, so which
of them are saved does not matter, only how many.
"""
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Attention, which is the most expensive to compute per byte of its result."""
OTHER_SAVED_OPS = ("attention", "reduce_scatter_tensor")
"""Operators outside of torch's own whose results are saved: attention by chunks, and reduce-scatter, whose results are
expensive to communicate and small.
"""


def apply_activation_checkpointing(model: nn.Module, spec: ParallelSpec, config: ActivationCheckpointConfig) -> None:
    if config.mode == "none":
        return
    if config.segment > 1:
        stacks = [module for module in model.modules() if isinstance(getattr(module, "stack", None), BlockStack)]
        if not stacks:
            raise ConfigError(
                "activation_checkpoint.segment > 1 needs a model with a BlockStack, and this one has none",
                "try activation_checkpoint.segment = 1",
            )
        for module in stacks:
            module.stack = CheckpointedBlockStack(config.segment)
        return
    for block in find_blocks(model, spec):
        checkpoint_block(block, config.mode)


def checkpoint_block(block: nn.Module, mode: Literal["full", "selective"]) -> None:
    """Wraps the forward of the module, so that parameter names stay and hooks of other axes run once, around it."""
    context: dict[str, Any] = {"context_fn": selective_contexts} if mode == "selective" else {}
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)


RECOMPUTING: list[None] = []
"""Not empty inside `recompute_all`."""


@contextmanager
def recompute_all() -> Iterator[None]:
    """Selective checkpointing saves nothing inside: blockwise attention would save the scores of every block."""
    RECOMPUTING.append(None)
    try:
        yield
    finally:
        RECOMPUTING.pop()


def selective_contexts() -> tuple[Any, Any]:
    """The contexts of one forward pass of a block and of its recomputation."""
    return create_selective_checkpoint_contexts(SelectivePolicy())  # type: ignore[no-any-return]


class SelectivePolicy:
    """What selective checkpointing saves of one forward pass: attention, and half of the results of matrix products.

    A matrix product is saved if fewer elements of them have been saved than left out before it. So the first one is
    recomputed, and of a gated feed-forward the second one is saved; the last one of a block, which backward does not
    need, is not. Recomputation decides as the forward pass did, since it runs the same operators in the same order.
    """

    def __init__(self) -> None:
        self.excess = {False: 0, True: 0}
        """elements of matrix products that are saved, less those that are recomputed; of forward, of recomputation"""

    def __call__(self, context: Any, operation: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if RECOMPUTING:
            return CheckpointPolicy.PREFER_RECOMPUTE
        name = operation.__name__.partition(".")[0]
        if operation.namespace != "aten":
            saved = name in OTHER_SAVED_OPS
        elif name in MATMULS:
            saved = self.excess[context.is_recompute] < 0
            size = result_size(name, args)
            self.excess[context.is_recompute] += size if saved else -size
        else:
            saved = name in ATTENTION
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def result_size(name: str, args: tuple[Any, ...]) -> int:
    """The number of elements of a matrix product."""
    left, right = args[1:3] if name == "addmm" else args[:2]
    columns = right.shape[0] if name == "linear" else right.shape[-1]
    return int(left.numel() // left.shape[-1] * columns)


class CheckpointedBlockStack(BlockStack):
    """Checkpoints segments of consecutive blocks: only the input of every segment is saved. Stand-ins for blocks of
    other pipeline stages are in no segment.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.checkpoint: Callable[..., Tensor] = partial(checkpoint, use_reentrant=False)

    def forward(self, blocks: Iterable[nn.Module], x: Tensor, rotary: RotaryTables) -> Tensor:
        for is_stand_in, group in groupby(blocks, key=lambda block: isinstance(block, StandIn)):
            block_list = list(group)
            if is_stand_in or not torch.is_grad_enabled():
                x = super().forward(block_list, x, rotary)
                continue
            for start in range(0, len(block_list), self.size):
                segment = partial(super().forward, block_list[start : start + self.size])
                x = self.checkpoint(segment, x, rotary)
        return x
