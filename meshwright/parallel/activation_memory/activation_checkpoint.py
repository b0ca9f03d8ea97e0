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

from meshwright.config import ActivationCheckpointConfig
from meshwright.errors import ConfigError
from meshwright.models.layers.block_stack import BlockStack
from meshwright.models.layers.rotary import RotaryTables
from meshwright.parallel.parallel_spec import ParallelSpec, find_blocks
from meshwright.parallel.pipeline_parallel.stand_ins import StandIn

SAVED_OPS = (
    "mm",
    "bmm",
    "addmm",
    "linear",
    "_grouped_mm",
    "_scaled_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""The operators whose results selective checkpointing saves: matrix products and attention, which are expensive to
compute and no larger than other activations.
"""
OTHER_SAVED_OPS = ("attention", "reduce_scatter_tensor")
"""The same of operators outside of torch's own: attention by chunks, and reduce-scatter, whose results are expensive to
communicate and smaller.
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
    context: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, selective_policy)}
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **(context if mode == "selective" else {}))


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


def selective_policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if RECOMPUTING:
        return CheckpointPolicy.PREFER_RECOMPUTE
    name = operation.__name__.partition(".")[0]
    saved = name in SAVED_OPS if operation.namespace == "aten" else name in OTHER_SAVED_OPS
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


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
