"""Attention after projection and rotation, within the documents of each sequence."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class CoreAttention(nn.Module):
    """Causal scaled dot-product attention over (batch, heads, sequence, head size). Keys and values may have
    fewer heads than queries. Attention does not cross documents.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        grouped_query = q.shape[1] != k.shape[1]
        if documents is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped_query)
        mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped_query)


def document_ids(tokens: Tensor, separator: int | None) -> Tensor | None:
    """The index of each token's document in its sequence; a separator belongs to the document that it ends."""
    if separator is None:
        return None
    is_separator = (tokens == separator).long()
    return is_separator.cumsum(dim=1) - is_separator
