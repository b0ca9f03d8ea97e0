"""Context parallelism: each rank has chunks of every sequence, and attention alone reaches across chunks.

Both methods are exact. Positions, labels and masks are those of the full sequences.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn

from meshwright.base.models.spec import AttentionSeam
from meshwright.core.models.layers.rotary import RotaryEmbedding
from meshwright.core.parallel.context_parallel.context_attention import ContextAttention
from meshwright.core.parallel.context_parallel.ring_attention import beyond_ring
from meshwright.core.parallel.context_parallel.seams import CoreAttentionSeam, TorchAttentionSeam
from meshwright.core.parallel.context_parallel.sequence_chunks import ChunkRotaryEmbedding
from meshwright.core.parallel.context_parallel.transformers_seam import replace_attention
from meshwright.core.parallel.parallel_spec import ParallelSpec, find_blocks, find_modules
from meshwright.core.torch_private import tree_leaves
from meshwright.errors import ConfigError


def apply_context_parallel(model: nn.Module, spec: ParallelSpec, attention: ContextAttention) -> None:
    """Replaces attention and positions of a model or pipeline stage by those of a rank with sequence chunks."""
    if spec.attention.modules:
        replace_modules(model, attention, spec.attention)
    else:
        replace_calls(model, attention, spec)


def replace_modules(model: nn.Module, attention: ContextAttention, seam: AttentionSeam) -> None:
    """Replaces attention and rotary positions of a built-in family."""
    if attention.method == "ring" and not seam.is_plain:
        raise beyond_ring("a soft cap or a sliding window")
    cores = set(find_modules(model, seam.modules))
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, RotaryEmbedding):
                setattr(module, name, ChunkRotaryEmbedding(child, attention.chunks))
            elif child in cores:
                setattr(module, name, CoreAttentionSeam(child, attention))


def replace_calls(model: nn.Module, attention: ContextAttention, spec: ParallelSpec) -> None:
    """Replaces the attention of any other model, and gives it the positions of the rank's tokens."""
    attention.is_custom = True
    replace_attention(model, attention)
    seam = TorchAttentionSeam(attention)
    for module in (model, *find_blocks(model, spec)):
        seam.wrap(module)
    if spec.positions:
        hook = partial(add_positions, attention, spec.positions)
        module_with_argument(model, spec.positions).register_forward_pre_hook(hook, with_kwargs=True)


def add_positions(
    attention: ContextAttention, name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook that passes the positions of the rank's tokens in their full sequences."""
    if not attention.enabled or kwargs.get(name) is not None:
        return None
    tokens = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim > 1)
    positions = attention.chunks.positions(tokens.shape[1] * attention.chunks.ranks, tokens.device)
    return args, kwargs | {name: positions.expand(len(tokens), -1)}


def module_with_argument(model: nn.Module, name: str) -> nn.Module:
    """The outermost module whose forward takes an argument of this name."""
    for module in model.modules():
        if name in inspect.signature(module.forward).parameters:
            return module
    raise ConfigError(
        f"ParallelSpec.positions = {name} is no argument of the model's forward", "expected the name of an argument"
    )
