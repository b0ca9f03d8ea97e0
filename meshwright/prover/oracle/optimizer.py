"""What surrounds an update by its definition: clipping, router biases, loss scale, learning rate and seeds."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.base.config import PrecisionConfig, ScheduleConfig
from meshwright.prover.oracle.update_rules import State


def global_norm(gradients: dict[str, Tensor]) -> float:
    """The norm of all gradients as one vector."""
    return math.sqrt(math.fsum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def clip_factor(norm: float, clip: float) -> float:
    """The factor that limits a gradient of this norm to the norm `clip`; 0 disables clipping."""
    return clip / norm if clip and norm > clip else 1.0


def router_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The bias after a step (arXiv:2408.15664): it rises by `rate` for experts with less than the mean load, and falls
    for those with more. Loads are integers and compared exactly.
    """
    total, experts = int(load.sum()), len(load)
    signs = [(total > experts * tokens) - (total < experts * tokens) for tokens in load.tolist()]
    return bias + rate * torch.tensor(signs, dtype=bias.dtype, device=bias.device)


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """The learning rate of a step, counted from 0, in a run of `steps` steps: a linear warm-up to the peak, then the
    shape of the schedule down to `floor` times the peak in the last step.
    """
    if step < schedule.warmup:
        return peak / schedule.warmup * (step + 1)
    first, last = schedule.warmup, steps - 1
    if schedule.kind == "wsd":
        first = max(first, steps - round(schedule.decay * steps))
    done = 0.0 if step <= first else 1.0 if step >= last else (step - first) / (last - first)
    fraction = {
        "constant": 1.0,
        "cosine": schedule.floor + (1 - schedule.floor) * math.cos(math.pi * done / 2) ** 2,
        "linear": 1 - done * (1 - schedule.floor),
        "wsd": 1 - done * (1 - schedule.floor),
    }
    return peak * fraction[schedule.kind]


@dataclass(frozen=True)
class ReferenceLossScale:
    """fp16's loss scale: halved after a step that is not finite, doubled after `interval` finite steps in a row."""

    scale: float = 1.0
    interval: int = 0
    """0: the scale is constant"""
    finite_steps: int = 0

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> ReferenceLossScale:
        return cls(config.loss_scale, config.scale_interval) if config.compute == "fp16" else cls()

    def after(self, finite: bool) -> ReferenceLossScale:
        if not self.interval:
            return self
        if not finite:
            return replace(self, scale=self.scale / 2, finite_steps=0)
        if self.finite_steps + 1 == self.interval:
            return replace(self, scale=self.scale * 2, finite_steps=0)
        return replace(self, finite_steps=self.finite_steps + 1)


@dataclass(frozen=True)
class ReferenceState:
    """The state of a reference run between two steps."""

    parameters: dict[str, Tensor]
    """parameters and router biases"""
    moments: dict[str, State] = field(default_factory=dict)
    """by parameter; a parameter without an entry has not been updated yet"""
    loss_scale: ReferenceLossScale | None = None
    """None: that of the config at the start of a run"""


def step_seed(seed: int, step: int, coordinate: int) -> int:
    """The random seed of a step on the ranks with a data-parallel coordinate: 63 bits of a BLAKE2b digest."""
    digest = hashlib.blake2b(f"{seed}/step/{step}/data/{coordinate}".encode(), digest_size=8).digest()
    return sum(byte << (8 * index) for index, byte in enumerate(digest)) // 2
