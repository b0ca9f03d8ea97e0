"""The gradient noise scale recovers a known noise, and the search for a module that is not finite changes nothing."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.core.data.loader import MicroBatch
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.trainer.numerics import NoiseScale, first_nonfinite


class Normalized(nn.Module):
    """Returns the loss and the count of a batch; it has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x).square().sum(), torch.tensor(len(x))


def test_noise_scale_is_recovered_from_gradients_with_known_noise():
    """Local gradients are g_r = G + noise of variance S / b; the estimate tends to S / |G|^2."""
    generator = np.random.default_rng(0)
    size, replicas, batch = 1000, 4, 32
    true = generator.normal(size=size)
    true *= 2.0 / np.linalg.norm(true)
    noise = 6.0 / np.sqrt(size)  # per sample: S = 36
    scale = NoiseScale(batch, replicas, smoothing=0.99)
    for _ in range(600):
        local = true + generator.normal(size=(replicas, size)) * noise / np.sqrt(batch / replicas)
        estimate = scale.update(float(np.linalg.norm(local.mean(0))), float((local**2).sum(1).mean()))
    assert estimate == pytest.approx(36 / 4, rel=0.1)
    assert NoiseScale(32, 1).update(1.0, 1.0) is None


def test_search_for_a_module_that_is_not_finite_leaves_running_statistics_as_they_are():
    model = Normalized()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    batch = MicroBatch((torch.randn(4, 3),), 4)
    assert first_nonfinite(ParallelModel(model), [batch], torch.device("cpu"), nullcontext) is None
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
