"""Finds spikes and divergence in a series of losses, robustly: medians instead of means. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NORMAL_MAD = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""
REACH = 2
"""Steps before and after a step between which its value is interpolated."""
NEIGHBOURS = 64
"""The nearest steps whose residuals tell how large one usually is."""
MIN_NEIGHBOURS = 8
SPIKE_DEVIATIONS, JOINT_DEVIATIONS = 8.0, 4.0
"""A step is a spike if its loss is so many robust deviations above its neighbours; fewer are enough if the gradient
norm is above them as well."""
SPIKE_EXCESS = 0.05
"""The smallest spike, as a fraction of the loss."""
SMALLEST_SPREAD = 1e-4
"""A spread below this is that of rounding, as a fraction of the value."""
MAX_SPIKES = 16
DIVERGED_EXCESS = 0.2
"""A run has diverged if its loss stays above the best that it had reached by this fraction."""
SMOOTHED_STEPS = 5

Series = NDArray[np.float64]


@dataclass(frozen=True)
class Spike:
    """A step whose loss is far above that of the steps around it."""

    index: int
    """the position in the series"""
    expected: float
    """the loss that the steps around it predict"""
    deviations: float
    """robust deviations of the loss above it"""
    norm_deviations: float
    """the same of the gradient norm"""


@dataclass(frozen=True)
class Divergence:
    """A loss that rises and stays high."""

    index: int
    """the first position from which on the loss is above the limit"""
    before: float
    """the lowest smoothed loss"""
    after: float
    """the median of the finite losses since; infinity if there is none"""


def find_spikes(loss: Series, grad_norm: Series) -> list[Spike]:
    """The steps whose loss stands out, the largest deviation first. Steps that are not finite are left out, and so are
    the first and the last REACH steps, which have no neighbours on one side.
    """
    finite = np.flatnonzero(np.isfinite(loss) & np.isfinite(grad_norm))
    if len(finite) < 2 * REACH + MIN_NEIGHBOURS:
        return []
    losses = Residuals(loss[finite])
    norms = Residuals(grad_norm[finite])
    spikes = []
    for index in np.argsort(-losses.values)[: 4 * MAX_SPIKES].tolist():
        excess, deviations = losses.deviation(index)
        norm_deviations = norms.deviation(index)[1]
        alone, joint = deviations >= SPIKE_DEVIATIONS, min(deviations, norm_deviations) >= JOINT_DEVIATIONS
        if excess >= SPIKE_EXCESS and (alone or joint):
            spikes.append(Spike(int(finite[index]), losses.expected(index), deviations, norm_deviations))
    return sorted(spikes, key=lambda spike: -spike.deviations)[:MAX_SPIKES]


class Residuals:
    """How far every value of a series is from the interpolation of its neighbours, as a fraction of the value."""

    def __init__(self, series: Series) -> None:
        self.positive = bool((series > 0).all())
        scale = float(np.median(np.abs(series))) or 1.0
        self.series = np.log(series) if self.positive else series / scale
        self.scale = scale
        self.values = np.zeros(len(series))
        inner = np.arange(REACH, len(series) - REACH)
        x = self.series
        lines = [
            x[inner - i] + (x[inner + j] - x[inner - i]) * i / (i + j)
            for i in range(1, REACH + 1)
            for j in range(1, REACH + 1)
        ]
        self.values[inner] = x[inner] - np.median(lines, axis=0)

    def deviation(self, index: int) -> tuple[float, float]:
        """(the residual minus the usual one, the same in robust deviations). A curved trend has residuals of its own,
        which the median of the neighbours removes.
        """
        inner = np.arange(REACH, len(self.values) - REACH)
        others = inner[(inner >= index - NEIGHBOURS) & (inner <= index + NEIGHBOURS) & (inner != index)]
        nearest = self.values[others[np.argsort(np.abs(others - index), kind="stable")][:NEIGHBOURS]]
        usual = float(np.median(nearest))
        spread = NORMAL_MAD * float(np.median(np.abs(nearest - usual)))
        excess = float(self.values[index]) - usual
        return excess, excess / max(spread, SMALLEST_SPREAD)

    def expected(self, index: int) -> float:
        """The value without its excess."""
        value = float(self.series[index]) - self.deviation(index)[0]
        return float(np.exp(value)) if self.positive else value * self.scale


def find_divergence(loss: Series) -> Divergence | None:
    """The place from which on the loss stays above the best that it had reached: by DIVERGED_EXCESS of it, and by half
    of the improvement since the start. Losses that are not finite are high.
    """
    high = np.where(np.isfinite(loss), loss, np.inf)
    if len(high) < 2 or not np.isfinite(high[0]):
        return None
    width = min(SMOOTHED_STEPS, len(high))
    smoothed = np.median(np.lib.stride_tricks.sliding_window_view(high, width), axis=1)
    best = min(float(high[0]), float(smoothed.min()))
    limit = best + max(DIVERGED_EXCESS * abs(best), (float(high[0]) - best) / 2)
    below = np.flatnonzero(high <= limit)
    index = int(below[-1]) + 1
    since = high[index:]
    if len(since) < min(SMOOTHED_STEPS, len(high) // 2):
        return None
    finite = since[np.isfinite(since)]
    return Divergence(index, best, float(np.median(finite)) if len(finite) else float("inf"))
