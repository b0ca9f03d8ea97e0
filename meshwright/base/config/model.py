"""The settings of a model of a built-in family, and of its low-rank adaptation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated

from meshwright.base.config.constraints import (
    PositiveFloat,
    Range,
    UnitFraction,
    nearest_values,
)
from meshwright.errors import ConfigError

MAX_LAYERS = 1 << 14
"""Limit of transformer blocks, each of which is a module."""


Scalar = bool | int | float | str


class OptionTable(Mapping[str, Scalar]):
    """A table of settings whose keys the model family defines; immutable and hashable."""

    def __init__(self, options: Mapping[str, Scalar] | None = None) -> None:
        self._options = dict(options or {})

    def __getitem__(self, key: str) -> Scalar:
        return self._options[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __hash__(self) -> int:
        return hash(frozenset(self._options.items()))

    def __repr__(self) -> str:
        return repr(self._options)


@dataclass(frozen=True)
class ModelConfig:
    """The model: a family, and the sizes that all families have."""

    vocab: Annotated[int, Range(minimum=2, maximum=1 << 24)] = 256
    """vocabulary size; every token id is below it"""
    width: Annotated[int, Range(minimum=1, maximum=1 << 20)] = 128
    """hidden size: width of the residual stream"""
    layers: Annotated[int, Range(minimum=1, maximum=MAX_LAYERS)] = 4
    """number of transformer blocks"""
    heads: Annotated[int, Range(minimum=1, maximum=1 << 16)] = 4
    """number of query heads; must divide width into an even head size"""
    kv_heads: Annotated[int, Range(minimum=1, maximum=1 << 16)] = 2
    """number of key and value heads (grouped-query attention); must divide heads"""
    ffn: Annotated[int, Range(minimum=1, maximum=1 << 24)] = 352
    """inner width of the feed-forward, or of each expert"""
    rope_theta: PositiveFloat = 10_000.0
    """base of the rotary position frequencies; families with learned positions have none"""
    norm_eps: PositiveFloat = 1e-5
    """epsilon of the norms"""
    tie: bool = False
    """tie the embedding and the output head to one matrix"""
    experts: Annotated[int, Range(minimum=0, maximum=1 << 16)] = 0
    """number of routed experts per layer; 0 for a dense feed-forward"""
    experts_active: Annotated[int, Range(minimum=1, maximum=1 << 16)] = 2
    """number of routed experts per token (top-k)"""
    experts_shared: Annotated[int, Range(minimum=0, maximum=1 << 10)] = 0
    """number of shared experts per layer, which process every token in addition to the routed ones"""
    router_bias_rate: UnitFraction = 0.001
    """change per step of each expert's routing bias, against its load over all ranks (auxiliary-loss-free load
    balancing); 0 keeps the biases fixed
    """
    router_aux_loss: Annotated[float, Range(minimum=0, maximum=1e6)] = 0.0001
    """coefficient of the load-balancing loss, which is computed per sequence"""
    capacity_factor: Annotated[float, Range(minimum=0, maximum=1e6)] = 0.0
    """tokens per expert and forward pass of a rank, as a multiple of an equal share; tokens above it are dropped, which
    makes results depend on the layout; 0 drops no token
    """
    separator: Annotated[int, Range(minimum=0, maximum=1 << 24)] | None = None
    """token id that ends a document; attention does not cross it; unset: one document per sequence"""
    family: str = "llama"
    """the model family; docs/families.md lists them"""
    options: OptionTable = field(default_factory=OptionTable)
    """settings of the family itself, in a table; docs/families.md lists them"""

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            heads = [h for h in range(1, min(self.width, 4096) + 1) if self.width % (2 * h) == 0]
            raise ConfigError(
                f"model.heads = {self.heads} does not divide model.width = {self.width} into even head sizes",
                f"expected {nearest_values(heads, self.heads) or 'an even width'}",
            )
        if self.heads % self.kv_heads:
            kv_heads = [k for k in range(1, min(self.heads, 4096) + 1) if self.heads % k == 0]
            raise ConfigError(
                f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}",
                f"expected {nearest_values(kv_heads, self.kv_heads)}",
            )
        if self.experts and self.experts_active > self.experts:
            raise ConfigError(
                f"model.experts_active = {self.experts_active} exceeds model.experts = {self.experts}",
                f"expected from 1 to {self.experts}",
            )
        if self.separator is not None and self.separator >= self.vocab:
            raise ConfigError(
                f"model.separator = {self.separator} is not a token of a vocabulary of {self.vocab}",
                f"expected from 0 to {self.vocab - 1}, or no separator",
            )


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adaptation (LoRA, arXiv:2106.09685): projections W become W + alpha / rank B A. The factors A and B are
    trained, and all other parameters are frozen.
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
