"""The decoder of the plain loops, written as one would for a single device: fused QKV, SDPA, and no parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.shapes import ROPE_THETA, Shape

HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden states, output weights, targets) -> mean loss."""


def torch_head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class LlamaBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, width, kv = shape, shape.width, shape.kv_heads * shape.head_size
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.qkv = nn.Linear(width, width + 2 * kv, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, shape.ffn, bias=False)
        self.up = nn.Linear(width, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        kv = self.shape.kv_heads * self.shape.head_size
        projected = self.qkv(self.norm1(x)).split([width, kv, kv], -1)
        q, k, v = (t.view(batch, sequence, -1, self.shape.head_size).transpose(1, 2) for t in projected)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        gqa = self.shape.heads != self.shape.kv_heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class GPT2Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, width = shape, shape.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, shape.ffn), nn.Linear(shape.ffn, width)

    def forward(self, x: Tensor, _cos: Tensor | None, _sin: Tensor | None) -> Tensor:
        batch, sequence, width = x.shape
        projected = self.qkv(self.norm1(x)).split(width, -1)
        q, k, v = (t.view(batch, sequence, -1, self.shape.head_size).transpose(1, 2) for t in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainModel(nn.Module):
    """Tokens and targets -> mean loss."""

    def __init__(self, shape: Shape, head_loss: HeadLoss = torch_head_loss) -> None:
        super().__init__()
        self.shape, self.head_loss, gpt2 = shape, head_loss, shape.family == "gpt2"
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.position = nn.Embedding(shape.sequence, shape.width) if gpt2 else None
        self.blocks = nn.ModuleList((GPT2Block if gpt2 else LlamaBlock)(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width) if gpt2 else nn.RMSNorm(shape.width, 1e-5)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tie:
            self.head.weight = self.embedding.weight
        frequencies = 1.0 / ROPE_THETA ** (torch.arange(0, shape.head_size, 2).float() / shape.head_size)
        angles = torch.outer(torch.arange(shape.sequence).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head_loss(self.norm(x).flatten(0, 1), self.head.weight, targets.flatten())


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Normal matrices, zero biases, and norms of one."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.02)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


NAMES = {"attention_norm": "norm1", "ffn_norm": "norm2", "attention.out": "out"}
FEED_FORWARD = ("gate", "up", "down")


def plain_tensors(shape: Shape, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of Meshwright's model, weights or gradients, under the names of the plain model."""
    kinds = ("weight", "bias") if shape.family == "gpt2" else ("weight",)
    result = {"embedding.weight": tensors["decoder.embedding.weight"]}
    if shape.family == "gpt2":
        result["position.weight"] = tensors["decoder.position.weight"]
    if not shape.tie:
        result["head.weight"] = tensors["head.weight"]
    for kind in kinds:
        result[f"norm.{kind}"] = tensors[f"decoder.norm.{kind}"]
        for layer in range(shape.layers):
            theirs, ours = f"decoder.blocks.{layer}", f"blocks.{layer}"
            qkv = [tensors[f"{theirs}.attention.{name}.{kind}"] for name in "qkv"]
            result[f"{ours}.qkv.{kind}"] = torch.cat(qkv)
            for name, own in NAMES.items():
                result[f"{ours}.{own}.{kind}"] = tensors[f"{theirs}.{name}.{kind}"]
            for name in FEED_FORWARD if shape.family != "gpt2" else FEED_FORWARD[1:]:
                result[f"{ours}.{name}.{kind}"] = tensors[f"{theirs}.ffn.{name}.{kind}"]
    return result
