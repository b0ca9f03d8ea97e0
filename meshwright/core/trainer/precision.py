"""The precision of a step: weight dtype, autocast for bf16 and fp16, fp16's loss scale, determinism and TF32."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from meshwright.base.config import PrecisionConfig
from meshwright.base.dtypes import TORCH_NAMES
from meshwright.core.torch_private import fix_compiled_kernels
from meshwright.errors import ConfigError


class Precision:
    """The dtypes of a run. Parameters are float32 except in fp64; bf16 and fp16 compute under autocast, with weights in
    the model that are float32, or in bf16 the rounded parameters.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.residual: torch.dtype | None = None
        """the dtype of the residual stream of built-in models; None: that of the embedding"""
        if config.compute == "bf16" and config.residual is not None:
            self.residual = getattr(torch, TORCH_NAMES[config.residual])
        self.compute: torch.dtype = getattr(torch, TORCH_NAMES[config.compute])
        self.device = device
        self.scaler = LossScale(config.loss_scale, config.scale_interval, device) if config.compute == "fp16" else None
        self._one = torch.ones((), device=device)

    @property
    def scale(self) -> Tensor:
        """The loss scale, on the device so that the host does not wait for it."""
        return self.scaler.scale if self.scaler is not None else self._one

    @property
    def parameters(self) -> torch.dtype:
        """The dtype of the parameters that the optimizer updates and that checkpoints contain."""
        return torch.float64 if self.compute == torch.float64 else torch.float32

    def autocast(self) -> AbstractContextManager[None]:
        if self.compute in (torch.bfloat16, torch.float16):
            return torch.autocast(self.device.type, dtype=self.compute)
        return nullcontext()


class LossScale:
    """fp16's dynamic loss scale: halved after an overflow, doubled after `interval` finite steps. It stays on the
    device, so that no step waits for it.
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


def set_determinism(config: PrecisionConfig, threads: int, device: torch.device) -> None:
    """Sets torch's process-wide switches that decide about bits: deterministic algorithms, TF32 and CPU threads."""
    deterministic = device.type == "cpu" if config.deterministic is None else config.deterministic
    if deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    fix_compiled_kernels(deterministic and device.type == "cuda")
    torch.set_num_threads(threads)
    # With warn_only, attention would run its kernels that are not deterministic.
    torch.use_deterministic_algorithms(deterministic)
    # This switch is a debugging aid: it would write every new tensor twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    tf32 = config.tf32 and device.type == "cuda"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


@contextmanager
def named_operators() -> Iterator[None]:
    """Turns torch's error about an operator without a deterministic implementation into a ConfigError."""
    try:
        yield
    except RuntimeError as error:
        operator, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise ConfigError(
            f"precision.deterministic = true, and torch has no deterministic implementation of {operator.split()[-1]}",
            "try precision.deterministic = false, or a model without this operator",
        ) from error
