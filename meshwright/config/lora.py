"""The settings of low-rank adaptation (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwright.config.constraints import PositiveFloat, Range
from meshwright.errors import ConfigError


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adaptation: projections W become W + alpha / rank B A. The factors A and B are trained, and all other
    parameters are frozen.
    """

    rank: Annotated[int, Range(minimum=0, maximum=1 << 14)] = 0
    """rank of the factors; 0 trains all parameters of the model instead"""
    alpha: PositiveFloat = 16.0
    """scale of the product of the factors, which is multiplied by alpha / rank"""
    targets: tuple[str, ...] = ("*.attention.*",)
    """projections that have factors: patterns of module names, such as *.attention.q, or names of Hugging Face models,
    such as q_proj
    """

    def __post_init__(self) -> None:
        if not self.targets or not all(self.targets):
            raise ConfigError("lora.targets is empty or has an empty entry", "expected patterns such as *.attention.*")

    @property
    def enabled(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank
