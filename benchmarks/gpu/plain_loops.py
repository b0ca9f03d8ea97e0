"""The plain training loops: eager as a tutorial writes it, and the fastest that is known for this model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, _sdpa_kernel

from benchmarks.gpu.plain_model import PlainModel, initialize
from benchmarks.gpu.shapes import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Shape
from benchmarks.gpu.token_batches import DeviceBatches


class PlainLoop:
    """A loop around a model that returns the mean loss of (tokens, targets)."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.device, self.batches = device, DeviceBatches(shape, device)
        self.last = torch.zeros(())

    def step(self) -> None:
        raise NotImplementedError

    def loss(self) -> float:
        return self.last.item()

    def details(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Memory is freed with the object."""


class EagerLoop(PlainLoop):
    """bfloat16 autocast over float32 weights, clip_grad_norm_ and torch's AdamW (foreach, its default)."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        super().__init__(shape, device)
        with device:
            self.model = PlainModel(shape)
        initialize(self.model)
        self.parameters = list(self.model.parameters())
        self.optimizer = make_adamw(self.parameters)

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(*next(self.batches))
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last = loss.detach()


class BestLoop(PlainLoop):
    """bfloat16 weights and residual stream with float32 master weights in one Triton AdamW, in-place cross-entropy,
    cuDNN attention, and torch.compile of the whole model where it is small and of each block elsewhere.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        from benchmarks.gpu.plain_kernels import MasterAdamW, fused_head_loss

        super().__init__(shape, device)
        with device:
            self.model = PlainModel(shape, fused_head_loss)
        initialize(self.model)
        for parameter in self.model.parameters():  # the rotary tables stay in float32
            parameter.data = parameter.data.bfloat16()
        self.optimizer = MasterAdamW(self.model)
        if device.type == "cuda":
            _sdpa_kernel([SDPBackend.CUDNN_ATTENTION])
            torch.compiler.config.cache_key_tag = "cudnn"
            for module in [self.model] if shape.width < 1024 else self.model.blocks:
                module.compile()

    def step(self) -> None:
        loss = self.model(*next(self.batches))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last = loss.detach()


def make_adamw(parameters: Iterable[nn.Parameter], fused: bool | None = None) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=fused)
