"""The parameters of the decoder by name, with their shapes and initial values, from the config alone."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from meshwright.base.config import ModelConfig, RunConfig

ROWS = 1024
"""Rows of a matrix that one random generator produces."""
STD = 0.02


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, and of the routers' biases."""
    width, kv_width = model.width, model.width // model.heads * model.kv_heads
    shapes: dict[str, tuple[int, ...]] = {"decoder.embedding.weight": (model.vocab, width)}
    for index in range(model.layers):
        block: dict[str, tuple[int, ...]] = {
            "attention_norm.weight": (width,),
            "attention.q.weight": (width, width),
            "attention.k.weight": (kv_width, width),
            "attention.v.weight": (kv_width, width),
            "attention.out.weight": (width, width),
            "ffn_norm.weight": (width,),
        }
        dense = "ffn.shared" if model.experts else "ffn"
        if inner := model.experts_shared * model.ffn if model.experts else model.ffn:
            block |= {f"{dense}.{name}.weight": (inner, width) for name in ("gate", "up")}
            block[f"{dense}.down.weight"] = (width, inner)
        if model.experts:
            block |= {"ffn.router.weight": (model.experts, width), "ffn.router.bias": (model.experts,)}
            block |= {f"ffn.bank.{name}": (model.experts, model.ffn, width) for name in ("gate", "up")}
            block["ffn.bank.down"] = (model.experts, width, model.ffn)
        shapes |= {f"decoder.blocks.{index}.{name}": shape for name, shape in block.items()}
    shapes["decoder.norm.weight"] = (width,)
    return shapes if model.tie else shapes | {"head.weight": (model.vocab, width)}


def initial_values(config: RunConfig) -> dict[str, Tensor]:
    """The initial value of every parameter and router bias, in float32."""
    return {name: initial_value(config, name, shape) for name, shape in parameter_shapes(config.model).items()}


def initial_value(config: RunConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 3:
        return torch.stack([initial_value(config, f"{name}.{expert}", shape[1:]) for expert in range(shape[0])])
    if len(shape) == 1:  # norms are one, biases zero
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    return torch.cat([initial_row_block(config, name, shape, block) for block in range(math.ceil(shape[0] / ROWS))])


def initial_row_block(config: RunConfig, name: str, shape: tuple[int, ...], block: int) -> Tensor:
    """Rows [1024 block, 1024 (block + 1)) of a matrix, of which that of an expert is named `...bank.gate.7`: normal
    numbers of a generator that is seeded by the first 8 bytes of SHA-256 of seed/name/block. The standard deviation is
    0.02, divided by sqrt(2 layers) for the projections into the residual stream.
    """
    seed = int.from_bytes(hashlib.sha256(f"{config.seed}/{name}/{block}".encode()).digest()[:8], "little", signed=True)
    generator = torch.Generator()
    generator.manual_seed(seed)
    rows = torch.randn(min(ROWS, shape[0] - ROWS * block), shape[1], generator=generator)
    into_residual = name.split(".")[3:5] == ["attention", "out"] or "down" in name.split(".")
    return rows * (STD / math.sqrt(2 * config.model.layers) if into_residual else STD)
