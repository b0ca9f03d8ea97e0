"""Initial weights as a pure function of (seed, parameter name, row block), so they do not depend on the layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.config import ModelConfig
from meshwright.models.llama.model import LanguageModel

ROWS_PER_KEY = 1024
"""Rows that one random generator produces. A rank generates only the row blocks that overlap its shard."""

INIT_STD = 0.02


def build_on_meta(config: ModelConfig, dtype: torch.dtype) -> LanguageModel:
    """The language model on the meta device, without weights."""
    with torch.device("meta"):
        return LanguageModel(config).to(dtype)


def build_model(
    config: ModelConfig, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> LanguageModel:
    """The full language model with its initial weights."""
    model = build_on_meta(config, dtype).to_empty(device=device)
    if config.tie:  # to_empty allocates separate storage for each module
        model.tie()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        init_shard(tensor.detach(), name, tensor.shape, (0,) * tensor.ndim, config, seed)
    return model


def init_shard(
    local: Tensor, name: str, shape: Sequence[int], offset: Sequence[int], config: ModelConfig, seed: int
) -> None:
    """Initializes `local`, the shard at `offset` of a parameter or buffer with this name and full shape."""
    if "norm" in name.split(".")[-2]:
        local.fill_(1.0)
    elif name.endswith("router.bias"):
        local.zero_()
    elif len(shape) == 3:  # one matrix per expert, each with its own generator, so a rank generates only its experts
        for expert, matrix in enumerate(local, offset[0]):
            init_matrix_shard(matrix, f"{name}.{expert}", shape[1:], offset[1:], init_std(name, config), seed)
    else:
        init_matrix_shard(local, name, shape, offset, init_std(name, config), seed)


def init_matrix_shard(
    local: Tensor, name: str, shape: Sequence[int], offset: Sequence[int], std: float, seed: int
) -> None:
    if not local.numel():
        return
    first, end = offset[0], offset[0] + local.shape[0]
    for start in range(first // ROWS_PER_KEY * ROWS_PER_KEY, end, ROWS_PER_KEY):
        stop = min(start + ROWS_PER_KEY, shape[0])
        rows = initial_rows(seed, name, shape, start, stop, std)
        overlap_start, overlap_end = max(start, first), min(stop, end)
        block = rows[overlap_start - start : overlap_end - start]
        for dim in range(1, len(shape)):
            block = block.narrow(dim, offset[dim], local.shape[dim])
        local[overlap_start - first : overlap_end - first].copy_(block)


def init_std(name: str, config: ModelConfig) -> float:
    """The standard deviation of a parameter. Projections into the residual stream shrink with depth, so that
    its variance stays of order one.
    """
    into_residual = name.endswith(("attention.out.weight", "down.weight", "bank.down"))
    return INIT_STD / math.sqrt(2 * config.layers) if into_residual else INIT_STD


def initial_rows(seed: int, name: str, shape: Sequence[int], start: int, stop: int, std: float) -> Tensor:
    """Rows [start, stop) of a parameter's initial value, in float32 on the CPU; start is a multiple of ROWS_PER_KEY."""
    digest = hashlib.sha256(f"{seed}/{name}/{start // ROWS_PER_KEY}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn((stop - start, *shape[1:]), generator=generator) * std
