"""Initial weights as a pure function of (seed, parameter name, row block): the same on every layout, from the meta
device.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from meshwright.config import ModelConfig
from meshwright.model.decoder import LanguageModel, RMSNorm

ROWS = 1024
"""Rows generated from one key: a rank that holds part of a matrix generates the blocks it needs, and no more."""

STD = 0.02


def build(
    config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> LanguageModel:
    """The language model with its initial weights, made on the meta device and filled parameter by parameter."""
    with torch.device("meta"):
        model = LanguageModel(config).to(dtype)
    model.to_empty(device=device)
    if config.tie:  # to_empty gives each owner its own storage
        model.tie()
    fill(model, config, seed)
    return model


@torch.no_grad()
def fill(model: nn.Module, config: ModelConfig, seed: int) -> None:
    norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, RMSNorm)}
    for name, parameter in model.named_parameters():
        if name in norms:
            parameter.fill_(1.0)
            continue
        for start in range(0, parameter.shape[0], ROWS):
            stop = min(start + ROWS, parameter.shape[0])
            parameter[start:stop].copy_(initial_rows(seed, name, parameter.shape, start, stop, std_of(name, config)))


def std_of(name: str, config: ModelConfig) -> float:
    """Projections back into the residual stream are smaller with depth, so that its variance stays of order one."""
    back_into_residual = name.endswith(("attention.out.weight", "down.weight"))
    return STD / math.sqrt(2 * config.layers) if back_into_residual else STD


def initial_rows(seed: int, name: str, shape: torch.Size, start: int, stop: int, std: float) -> Tensor:
    """Rows [start, stop) of a parameter's initial value, in float32 on the CPU; start is a multiple of ROWS."""
    digest = hashlib.sha256(f"{seed}/{name}/{start // ROWS}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn((stop - start, *shape[1:]), generator=generator) * std
