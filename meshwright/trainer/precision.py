"""What a step computes in: the dtype of weights, autocast for bf16 and fp16, and fp16's loss scale."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from meshwright.config import PrecisionConfig
from meshwright.config.dtypes import TORCH_NAMES


class Precision:
    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.compute: torch.dtype = getattr(torch, TORCH_NAMES[config.compute])
        self.device = device
        self.scaler = LossScale(config.loss_scale, config.scale_interval, device) if config.compute == "fp16" else None

        self._one = torch.ones((), device=device)

    @property
    def scale(self) -> Tensor:
        """What the loss is multiplied by before backward; on the device, so that nothing waits for it."""
        return self.scaler.scale if self.scaler is not None else self._one

    @property
    def weights(self) -> torch.dtype:
        return torch.float64 if self.compute == torch.float64 else torch.float32

    def autocast(self) -> AbstractContextManager[None]:
        if self.compute in (torch.bfloat16, torch.float16):
            return torch.autocast(self.device.type, dtype=self.compute)
        return nullcontext()


class LossScale:
    """fp16's dynamic loss scale: halved by an overflow, doubled after so many finite steps. Lives on the device, so
    no step waits for it.
    """

    def __init__(self, first: float, interval: int, device: torch.device) -> None:
        self.interval = interval
        self.scale = torch.tensor(first, device=device)
        self.finite_steps = torch.zeros((), dtype=torch.int64, device=device)

    def to_json(self) -> dict[str, float]:
        return {"scale": float(self.scale), "finite_steps": int(self.finite_steps)}

    def restore(self, values: dict[str, float]) -> None:
        self.scale.fill_(values["scale"])
        self.finite_steps.fill_(int(values["finite_steps"]))

    def update(self, finite: Tensor) -> None:
        self.finite_steps = torch.where(finite, self.finite_steps + 1, 0)
        grow = self.finite_steps >= self.interval
        self.scale = torch.where(finite, torch.where(grow, self.scale * 2, self.scale), self.scale / 2)
        self.finite_steps = torch.where(grow, 0, self.finite_steps)
