"""The seams at which attention is switched: modules of a family, and torch's scaled_dot_product_attention.

A seam turns what the model computes into an `AttentionCall`. `transformers_seam.py` has the third seam, the attention
interface of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.parallel.context_parallel.attention_call import AttentionCall
from meshwright.core.parallel.context_parallel.context_attention import ContextAttention
from meshwright.errors import ConfigError

TORCH_ATTENTION = F.scaled_dot_product_attention


class CoreAttentionSeam(nn.Module):
    """Replaces a module of a built-in family that attends after projection and rotation."""

    def __init__(self, core: nn.Module, attention: ContextAttention) -> None:
        super().__init__()
        self.core, self.attention = core, attention

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, _mask: Tensor | None) -> Tensor:
            return self.core(q, k, v, documents)  # type: ignore[no-any-return]

        return self.attention(AttentionCall(q, k, v, attend, documents=documents))


@dataclass
class TorchAttentionSeam:
    """Replaces `torch.nn.functional.scaled_dot_product_attention` while the forward of a wrapped module runs."""

    attention: ContextAttention

    def wrap(self, module: nn.Module) -> None:
        """A block is wrapped as well as the model that contains it: activation checkpointing calls it alone."""
        forward = module.forward

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch_attention(self.attend):
                return forward(*args, **kwargs)

        module.forward = run

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Has the signature of torch's function."""
        require_self_attention(query.shape[2], key.shape[2])

        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            gqa = enable_gqa and q.shape[1] != k.shape[1]
            return TORCH_ATTENTION(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa)

        mask = attn_mask
        if self.attention.enabled and mask is not None:
            mask = full_sequence_mask(mask, query.shape[2], self.attention.group)
        beyond_plain = "dropout" if dropout_p else ""
        with torch_attention(TORCH_ATTENTION):
            return self.attention(
                AttentionCall(query, key, value, attend, mask, is_causal, scale, beyond_plain=beyond_plain)
            )


@contextmanager
def torch_attention(function: Callable[..., Tensor]) -> Iterator[None]:
    """Binds a function to the name `torch.nn.functional.scaled_dot_product_attention`; nn.TransformerEncoderLayer calls
    it in evaluation only without its fast path.
    """
    before, fast_path = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    F.scaled_dot_product_attention = function
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
        torch.backends.mha.set_fastpath_enabled(fast_path)


def require_self_attention(queries: int, keys: int) -> None:
    if queries != keys:
        raise ConfigError(
            f"an attention of the model has {queries} queries and {keys} keys on this rank, and context parallelism "
            "divides the sequence of self-attention only",
            "try layout.context = 1",
        )


def full_sequence_mask(mask: Tensor, tokens: int, group: dist.ProcessGroup) -> Tensor:
    """The mask of full sequences, (batch, heads, queries, keys), from the mask that a model gives its attention on a
    rank with `tokens` tokens: one of full sequences already, or one that is the same for all queries.
    """
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    queries, keys = mask.shape[2:]
    full = tokens * group.size()
    if keys == full and queries in (1, full):
        return mask
    if queries == 1 and keys == tokens:
        return gather_chunks(mask, group)
    raise ConfigError(
        f"the attention of the model has a mask of {queries} queries and {keys} keys, and the rank has {tokens} of "
        f"{full} tokens, so that it is not a mask of full sequences",
        "expected is_causal=True, a mask per key, or a mask of full sequences in the batch; or try layout.context = 1",
    )


def gather_chunks(chunk: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The chunks of all ranks, in the order of ranks, along the last dimension."""
    chunks = [torch.empty_like(chunk, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(chunks, chunk.contiguous(), group=group)
    return torch.cat(chunks, dim=-1)
