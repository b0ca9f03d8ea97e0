"""cuDNN's deterministic attention: when it runs, what it needs, and that it equals torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshwright.core.kernels import cudnn_attention
from meshwright.core.kernels.cudnn_attention import (
    CudnnAttention,
    attention_backward,
    by_token,
    supports,
    use_cudnn_backward,
)
from meshwright.errors import ConfigError


@pytest.fixture(autouse=True)
def unused():
    yield
    use_cudnn_backward(False)
    torch.use_deterministic_algorithms(False)


def heads(count: int, size: int = 16) -> torch.Tensor:
    return torch.randn(2, 8, count, size).transpose(1, 2).requires_grad_()


def test_without_the_package_a_run_that_needs_it_is_refused(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "has_cudnn_frontend", lambda: False)
    with pytest.raises(ConfigError, match=r"needs the package nvidia-cudnn-frontend; try pip install"):
        use_cudnn_backward(True)


def test_it_is_used_on_cuda_only_and_only_where_a_run_has_chosen_it(monkeypatch):
    monkeypatch.setattr(cudnn_attention, "has_cudnn_frontend", lambda: True)
    with torch.device("meta"):
        q = torch.empty(2, 4, 8, 16, dtype=torch.bfloat16)
    assert not supports(q, q, q)
    use_cudnn_backward(True)
    assert not supports(q, q, q)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert not supports(q, q, q)
    torch.use_deterministic_algorithms(True)
    assert supports(q, q, q)
    assert not supports(q.float(), q.float(), q.float())
    assert not supports(q[:, :, :1], q, q)
    assert not supports(q[..., :12], q[..., :12], q[..., :12])


def test_gradients_flow_through_the_backward_operator(monkeypatch):
    """With torch's attention in place of cuDNN's kernels, which need a device."""
    q, k, v = heads(4), heads(2), heads(2)

    def forward(q, k, v, *_settings, scale):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out, torch.zeros(q.shape[:3])

    def backward(gradient, q, k, v, _out, _log_sum, scale):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            out, _ = forward(*leaves, scale=scale)
        return torch.autograd.grad(out, leaves, gradient)

    monkeypatch.setattr(cudnn_attention, "cudnn_attention_forward", forward)
    monkeypatch.setattr(cudnn_attention, "attention_backward", backward)
    found = torch.autograd.grad(CudnnAttention.apply(q, k, v, 0.25).square().sum(), (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25, enable_gqa=True)
    for left, right in zip(found, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(left, right)


def test_the_compiler_knows_the_layout_of_the_gradients():
    with torch.device("meta"):
        q, k = torch.empty(2, 4, 8, 16), torch.empty(2, 2, 8, 16)
        gradients = attention_backward(q, q, k, k, q, torch.empty(2, 4, 8), 0.25)
    assert [(g.shape, g.stride()) for g in gradients] == [(t.shape, by_token(t).stride()) for t in (q, k, k)]
