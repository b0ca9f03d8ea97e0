"""Synchronized batch normalization: the statistics and gradients of one process with the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.core.parallel.sync_batch_norm import synchronize_batch_norm
from meshwright.testing import run_ranks

SIZES = (3, 5)


def build(norm: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm(4), nn.ReLU(), nn.Conv2d(4, 2, 3), norm(2)).double()


def batch() -> torch.Tensor:
    return torch.randn(sum(SIZES), 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def train_on_part(world):
    model = build(nn.SyncBatchNorm)
    synchronize_batch_norm(model, lambda: dist.group.WORLD)
    part = batch().split(SIZES)[world.rank]
    model(part).square().sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return gradients(model), dict(model.named_buffers()), model.eval()(part)


def test_statistics_and_gradients_are_those_of_the_whole_batch():
    whole = build(nn.BatchNorm2d)
    whole(batch()).square().sum().backward()
    expected, buffers = gradients(whole), dict(whole.named_buffers())
    outputs = whole.eval()(batch()).split(SIZES)
    for (found, statistics, output), part in zip(run_ranks(train_on_part, 2), outputs, strict=True):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10)
        for name, value in buffers.items():
            torch.testing.assert_close(statistics[name], value, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(output, part, rtol=1e-10, atol=1e-10)


def test_without_a_group_it_is_batch_normalization():
    model, plain = build(nn.SyncBatchNorm), build(nn.BatchNorm2d)
    synchronize_batch_norm(model)
    torch.testing.assert_close(model(batch()), plain(batch()), rtol=1e-10, atol=1e-10)


def test_statistics_of_half_precision_are_those_of_float32():
    """A sum of 40,000 values in bfloat16 stops growing, and such a count is not exact."""
    x = (torch.randn(4, 2, 100, 100, generator=torch.Generator().manual_seed(2)) + 3).bfloat16()
    model, plain = nn.SyncBatchNorm(2), nn.BatchNorm2d(2)
    synchronize_batch_norm(model)
    output = model(x)
    expected = plain(x.float())
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(model.running_mean, plain.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.running_var, plain.running_var, rtol=1e-5, atol=1e-6)


def test_one_value_per_channel_raises_as_torch_does():
    model, plain = nn.SyncBatchNorm(2), nn.BatchNorm1d(2)
    synchronize_batch_norm(model)
    for norm in (model, plain):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            norm(torch.zeros(1, 2))
