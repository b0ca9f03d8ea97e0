"""Rows of tokens sorted by expert: values and gradients equal those of indexing, also where choices have no row."""

from __future__ import annotations

import pytest
import torch

from meshwright.core.models.layers.expert_rows import row_order

TOKENS, ACTIVE, WIDTH = 7, 3, 4


@pytest.mark.parametrize("rows", [TOKENS * ACTIVE, 11, 1])
def test_gather_and_combine_have_the_gradients_of_plain_indexing(rows):
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.randn(TOKENS, ACTIVE, dtype=torch.float64, generator=generator).requires_grad_()
    order = torch.randperm(TOKENS * ACTIVE, generator=generator)[:rows]
    choices = row_order(order, TOKENS, ACTIVE)
    ours = choices.combine(choices.gather(tokens).sin(), weights)
    plain = torch.zeros(TOKENS * ACTIVE, WIDTH, dtype=torch.float64)
    plain = plain.index_put((order,), tokens[order // ACTIVE].sin()).view(TOKENS, ACTIVE, WIDTH)
    theirs = (plain * weights[..., None]).sum(dim=1)
    assert torch.allclose(ours, theirs, rtol=1e-14, atol=1e-14)
    gradients = (torch.autograd.grad(out.square().sum(), (tokens, weights)) for out in (ours, theirs))
    for mine, other in zip(*gradients, strict=True):
        assert torch.allclose(mine, other, rtol=1e-13, atol=1e-13)


def test_combine_is_in_the_dtype_of_the_weights_and_gradients_in_that_of_the_rows():
    rows = torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.full((2, 2), 0.3, requires_grad=True)
    out = row_order(torch.tensor([2, 0, 1, 3]), 2, 2).combine(rows, weights)
    out.sum().backward()
    assert (out.dtype, rows.grad.dtype, weights.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
