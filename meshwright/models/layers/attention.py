"""Attention after projection and rotation, within the documents of each sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CoreAttention(nn.Module):
    """Causal scaled dot-product attention over (batch, heads, sequence, head size). Keys and values may have
    fewer heads than queries. Attention does not cross documents, nor look back further than `window` tokens.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        grouped_query = q.shape[1] != k.shape[1]
        if documents is None and self.window is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped_query)
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        if self.window is not None:
            mask = mask.triu(1 - self.window)
        if documents is not None:
            mask = mask & (documents[:, :, None] == documents[:, None, :])[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped_query)


def document_ids(tokens: Tensor, separator: int | None) -> Tensor | None:
    """The index of each token's document in its sequence; a separator belongs to the document that it ends."""
    if separator is None:
        return None
    is_separator = (tokens == separator).long()
    return is_separator.cumsum(dim=1) - is_separator
