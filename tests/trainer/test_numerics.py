"""The gradient noise scale recovers a known noise."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.trainer.numerics import NoiseScale


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
