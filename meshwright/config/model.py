"""The settings of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwright.config.constraints import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    UnitFraction,
    nearest_values,
)
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """The decoder's shape."""

    vocab: Annotated[int, Range(minimum=2, maximum=1 << 24)] = 256
    """size of the vocabulary; every token id must be below it"""
    width: PositiveInt = 128
    """width of the residual stream"""
    layers: PositiveInt = 4
    """number of decoder blocks"""
    heads: PositiveInt = 4
    """query heads; must divide width into even head sizes"""
    kv_heads: PositiveInt = 2
    """key and value heads (grouped-query attention); must divide heads"""
    ffn: PositiveInt = 352
    """inner width of the SwiGLU feed-forward"""
    rope_theta: PositiveFloat = 10_000.0
    """base of the rotary position frequencies"""
    norm_eps: PositiveFloat = 1e-5
    """epsilon of RMSNorm"""
    tie: bool = False
    """share one matrix between embedding and head"""
    experts: NonNegativeInt = 0
    """experts a layer; 0 is a dense feed-forward"""
    experts_active: PositiveInt = 2
    """experts that each token visits"""
    experts_shared: NonNegativeInt = 0
    """experts that every token visits beside those"""
    router_bias_rate: UnitFraction = 0.001
    """how far a step moves each expert's bias, by which tokens choose, against its load over all ranks; 0 never"""
    router_aux_loss: Annotated[float, Range(minimum=0, maximum=1e6)] = 0.0001
    """weight of a loss, of each sequence by itself, that is least where its tokens spread evenly over experts"""
    capacity_factor: Annotated[float, Range(minimum=0, maximum=1e6)] = 0.0
    """tokens an expert takes of one rank's pass, as a multiple of an even share; the rest are dropped, so that results
    depend on the layout; 0 drops none
    """
    separator: Annotated[int, Range(minimum=0, maximum=1 << 24)] | None = None
    """token that ends a document: no token attends to another document's"""

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            fits = [h for h in range(1, min(self.width, 4096) + 1) if self.width % (2 * h) == 0]
            raise ConfigError(
                f"model.heads = {self.heads} does not divide model.width = {self.width} into even head sizes",
                f"allowed: {nearest_values(fits, self.heads) or 'none; make the width even'}",
            )
        if self.heads % self.kv_heads:
            fits = [k for k in range(1, min(self.heads, 4096) + 1) if self.heads % k == 0]
            raise ConfigError(
                f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}",
                f"allowed: {nearest_values(fits, self.kv_heads)}",
            )
        if self.experts and self.experts_active > self.experts:
            raise ConfigError(
                f"model.experts_active = {self.experts_active} exceeds model.experts = {self.experts}",
                f"allowed: from 1 to {self.experts}",
            )
        if self.separator is not None and self.separator >= self.vocab:
            raise ConfigError(
                f"model.separator = {self.separator} is no token of a vocabulary of {self.vocab}",
                f"allowed: from 0 to {self.vocab - 1}, or unset",
            )
