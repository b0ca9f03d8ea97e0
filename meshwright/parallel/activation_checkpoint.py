"""Activations that backward computes again instead of finding them in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.config import ActivationCheckpointConfig
from meshwright.errors import ConfigError
from meshwright.models.decoder import BlockStack, RotaryTables
from meshwright.parallel.parallel_spec import ParallelSpec, find_blocks

SAVED_OPS = (
    "mm",
    "bmm",
    "addmm",
    "linear",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""What selective recomputation keeps: products and attention, dear to compute and no larger than the rest; and beside
them (see `keep`) sums that were scattered, which are dear to send and smaller.
"""


def apply_activation_checkpointing(model: nn.Module, parts: ParallelSpec, config: ActivationCheckpointConfig) -> None:
    if config.mode == "none":
        return
    if config.segment > 1:
        stacks = [module for module in model.modules() if isinstance(getattr(module, "stack", None), BlockStack)]
        if not stacks:
            raise ConfigError(
                "activation_checkpoint.segment > 1 needs a model with a BlockStack, and this one has none",
                "allowed: activation_checkpoint.segment = 1",
            )
        for module in stacks:
            module.stack = CheckpointedBlockStack(config.segment)
        return
    for block in find_blocks(model, parts):
        checkpoint_block(block, config.mode)


def checkpoint_block(block: nn.Module, mode: Literal["full", "selective"]) -> None:
    """The module's own forward alone: names stay, and hooks of other axes run around it, once."""
    context: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, selective_policy)}
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **(context if mode == "selective" else {}))


PASSING: list[None] = []


@contextmanager
def recompute_all() -> Iterator[None]:
    """Operations inside are computed again, dear or not: attention in blocks would keep each block's scores."""
    PASSING.append(None)
    try:
        yield
    finally:
        PASSING.pop()


def selective_policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if PASSING:
        return CheckpointPolicy.PREFER_RECOMPUTE
    name = operation.__name__.partition(".")[0]
    kept = name in SAVED_OPS if operation.namespace == "aten" else name == "reduce_scatter_tensor"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class CheckpointedBlockStack(BlockStack):
    """The way through the blocks that keeps only what enters every so many of them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, blocks: Iterable[nn.Module], x: Tensor, where: RotaryTables) -> Tensor:
        whole = list(blocks)
        for start in range(0, len(whole), self.size):
            through = partial(super().forward, whole[start : start + self.size])
            x = checkpoint(through, x, where, use_reentrant=False) if torch.is_grad_enabled() else through(x, where)
        return x
