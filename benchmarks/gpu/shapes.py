"""The models of the GPU benchmark: their sizes, their batches and their floating-point operations per token."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.base.config import ModelConfig
from meshwright.base.config.model import OptionTable

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
"""The AdamW settings of every contender."""
ROPE_THETA = 500_000.0


@dataclass(frozen=True)
class Shape:
    """A decoder and the batch that it is trained with."""

    name: str
    title: str
    family: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tie: bool
    batch: int
    sequence: int
    experts: int = 0
    experts_active: int = 2
    steps: int = 20
    """timed steps per turn of a contender, about four seconds"""

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.sequence

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply a token: the output projection counts once, the embedding does not."""
        if self.family == "gpt2":
            block = 4 * self.width**2 + 2 * self.width * self.ffn
        else:
            attention = 2 * self.width**2 + 2 * self.width * self.kv_heads * self.head_size
            active = self.experts_active if self.experts else 1
            block = attention + active * 3 * self.width * self.ffn + self.experts * self.width
        return self.layers * block + self.vocab * self.width

    @property
    def flops_per_token(self) -> int:
        """6 per weight of a matmul, and attention over the full sequence (not halved for causality)."""
        return 6 * self.matmul_parameters + 12 * self.layers * self.width * self.sequence

    def model_config(self) -> ModelConfig:
        """The same model as Meshwright configures it."""
        gpt2 = self.family == "gpt2"
        return ModelConfig(
            vocab=self.vocab,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            rope_theta=10_000.0 if gpt2 else ROPE_THETA,
            tie=self.tie,
            experts=self.experts,
            experts_active=self.experts_active,
            family=self.family,
            options=OptionTable({"positions": self.sequence} if gpt2 else {}),
        )


SHAPES = {
    "a": Shape("a", "GPT-2 of 124M", "gpt2", 12, 768, 12, 12, 3072, 50304, True, 32, 1024, steps=70),
    "b": Shape("b", "Llama of 1.2B", "llama", 16, 2048, 32, 8, 8192, 128256, True, 4, 4096, steps=16),
    "c": Shape("c", "8 layers of Llama 8B", "llama", 8, 4096, 32, 8, 14336, 128256, False, 2, 8192, steps=10),
}
EXPERTS = Shape("experts", "16 experts, top 2, 3B", "llama", 16, 2048, 32, 8, 1792, 32768, True, 4, 4096, 16, 2, 24)
"""A model of experts, and below it a dense model with as many active parameters per token."""
DENSE = replace(EXPERTS, name="dense", title="dense of the same active size", ffn=2 * 1792, experts=0)


def tiny(shape: Shape) -> Shape:
    """The same model at a size that a CPU trains in milliseconds."""
    kv_heads = 4 if shape.family == "gpt2" else 2
    return replace(
        shape,
        layers=2,
        width=64,
        heads=4,
        kv_heads=kv_heads,
        ffn=64 if shape.experts else 128,
        vocab=512,
        batch=2,
        sequence=32,
        experts=4 if shape.experts else 0,
        steps=2,
    )


def for_numerics(shape: Shape) -> Shape:
    """The same widths with two layers and a short batch, which a float32 reference fits beside."""
    return replace(shape, layers=2, batch=2, sequence=min(shape.sequence, 512))
