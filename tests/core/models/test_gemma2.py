"""The attention of the Gemma 2 family."""

from __future__ import annotations

import torch

from meshwright.core.models.layers.attention import CoreAttention


def test_attention_does_not_cross_documents_nor_its_window():
    q, k, v = (torch.randn(1, heads, 9, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    documents = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 1]])
    out = CoreAttention(3, 0.3, 2.0)(q, k, v, documents)
    (seen,) = torch.autograd.grad(out[0, :, 5].sum(), v, retain_graph=True)
    assert seen.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == [3, 4, 5]
    (seen,) = torch.autograd.grad(out[0, :, 7].sum(), v)
    assert seen.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == [6, 7]
