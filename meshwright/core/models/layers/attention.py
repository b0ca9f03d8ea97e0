"""Attention after projection and rotation, within the documents of each sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.kernels.cudnn_attention import deterministic_attention, supports
from meshwright.core.models.layers.chunked_attention import attention, chunk_scores


class CoreAttention(nn.Module):
    """Causal attention over (batch, heads, sequence, head size), within the last `window` tokens if that is not None.
    Keys and values may have fewer heads than queries. Attention does not cross documents. Scores are scaled by `scale`,
    by default head size ** -0.5, and with `cap` they are cap * tanh(scores / cap).
    """

    def __init__(self, window: int | None = None, scale: float | None = None, cap: float | None = None) -> None:
        super().__init__()
        self.window, self.scale, self.cap = window, scale, cap

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, positions: Tensor | None = None
    ) -> Tensor:
        """`documents` are those of the keys. Queries are the last of the keys, or with `positions` those at these
        positions among the keys, (batch, queries), as in generation from prompts of different lengths.
        """
        queries, keys = q.shape[2], k.shape[2]
        window = None if self.window is None or self.window >= keys else self.window
        if positions is not None:
            return self.at_positions(q, k, v, positions, window)
        if window is not None and documents is None and queries == 1:
            k, v, window = k[:, :, -window:], v[:, :, -window:], None
        if documents is None and window is None and self.cap is None and queries in (1, keys):
            grouped_query = q.shape[1] != k.shape[1]
            if queries == 1:  # it sees all keys
                return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=grouped_query)
            if supports(q, k, v):
                return deterministic_attention(q, k, v, q.shape[-1] ** -0.5 if self.scale is None else self.scale)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped_query)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return attention(q, k, v, documents, window, scale, self.cap)[0]  # type: ignore[no-any-return]

    def at_positions(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, window: int | None) -> Tensor:
        """Attention of few queries, with a mask of (batch, 1, queries, keys)."""
        keys = torch.arange(k.shape[2], device=q.device)
        visible = keys <= positions[..., None]
        if window is not None:
            visible &= keys > positions[..., None] - window
        visible = visible[:, None]
        if self.cap is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = chunk_scores(q, k, scale, self.cap)[0]
        masked = scores.view(*q.shape[:3], -1).masked_fill(~visible, -torch.inf)
        weights = masked.softmax(-1).to(v.dtype).view(scores.shape)
        return (weights @ v).view(*q.shape[:3], -1)


def document_ids(tokens: Tensor, separator: int | None) -> Tensor | None:
    """The index of each token's document in its sequence; a separator belongs to the document that it ends."""
    if separator is None:
        return None
    is_separator = (tokens == separator).long()
    return is_separator.cumsum(dim=1) - is_separator
