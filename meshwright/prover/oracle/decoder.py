"""The decoder as its definition says: parameters by name, tokens and labels -> token losses.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, routed and shared experts. It is compared with
`meshwright/models`, and so uses other formulations, in plain tensor operations: rotation by complex numbers, explicit
masks and softmax, cross-entropy by logsumexp, one expert after the other. In low precision, the inputs and outputs of
matrix products are rounded as under autocast; norms, softmax, router and loss are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright.config import IGNORE_INDEX, ModelConfig

Parameters = dict[str, Tensor]

LONG_SEQUENCE = 2048
"""Above this length, attention is computed for one block of queries at a time, and again in backward."""
QUERY_BLOCK = 512


@dataclass
class ForwardPass:
    """What one forward pass computes."""

    logits: Tensor
    """(batch, sequence, vocabulary), float32 at least"""
    token_losses: Tensor
    """(batch, sequence); zero where the label is masked"""
    balance: Tensor
    """(batch,): the balance loss of each sequence, summed over blocks"""
    loads: dict[str, Tensor] = field(default_factory=dict)
    """by the name of a router's bias: the number of tokens that chose each expert"""


class ReferenceDecoder:
    """The functions of a decoder of one config. `low` is the dtype of matrix products, or None."""

    def __init__(self, config: ModelConfig, low: torch.dtype | None = None) -> None:
        self.config, self.low = config, low
        self.head_size = config.width // config.heads

    def forward(self, parameters: Parameters, tokens: Tensor, labels: Tensor) -> ForwardPass:
        x = parameters["decoder.embedding.weight"][tokens]
        mask = attention_mask(tokens, self.config.separator)
        loads: dict[str, Tensor] = {}
        balance = x.new_zeros(len(tokens))
        for index in range(self.config.layers):
            prefix = f"decoder.blocks.{index}."
            block = {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}
            x = x + self.attention(block, self.norm(x, block["attention_norm.weight"]), mask)
            normalized = self.norm(x, block["ffn_norm.weight"])
            if not self.config.experts:
                x = x + self.swiglu(normalized, *(block[f"ffn.{m}.weight"] for m in ("gate", "up", "down")))
                continue
            out, block_balance, loads[f"{prefix}ffn.router.bias"] = self.experts(block, normalized)
            x, balance = x + out, balance + block_balance
        x = self.norm(x, parameters["decoder.norm.weight"])
        head = parameters["decoder.embedding.weight" if self.config.tie else "head.weight"]
        logits = at_least_float32(self.product(x, head))
        return ForwardPass(logits, token_losses(logits, labels), balance, loads)

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """x times the transposed matrix."""
        if self.low is None:
            return x @ matrix.mT
        return x.to(self.low) @ matrix.to(self.low).mT

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x / sqrt(mean of squares + eps) * weight."""
        wide = at_least_float32(x)
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        return (wide * (mean_square + self.config.norm_eps).rsqrt()).to(x.dtype) * weight

    def attention(self, block: Parameters, x: Tensor, mask: Tensor) -> Tensor:
        heads, kv_heads = self.config.heads, self.config.kv_heads
        q, k, v = (self.product(x, block[f"attention.{name}.weight"]) for name in "qkv")
        q = self.rotate(q.unflatten(-1, (heads, self.head_size)))
        k = self.rotate(k.unflatten(-1, (kv_heads, self.head_size)))
        v = v.unflatten(-1, (kv_heads, self.head_size))
        shared_by = torch.arange(heads, device=x.device) // (heads // kv_heads)  # the key head of each query head
        q, k, v = q.transpose(1, 2), k[:, :, shared_by].transpose(1, 2), v[:, :, shared_by].transpose(1, 2)
        if x.shape[1] <= LONG_SEQUENCE:
            mixed = self.attend(q, k, v, mask)
        else:
            rows = zip(q.split(QUERY_BLOCK, dim=2), mask.split(QUERY_BLOCK, dim=-2), strict=True)
            blocks = [checkpoint(self.attend, queries, k, v, seen, use_reentrant=False) for queries, seen in rows]
            mixed = torch.cat(blocks, dim=2)
        return self.product(mixed.transpose(1, 2).flatten(2), block["attention.out.weight"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """softmax(q k / sqrt(head size)) v over (batch, heads, sequence, head size); scores are float32 at least."""
        scores = at_least_float32(q) @ at_least_float32(k).mT / math.sqrt(self.head_size)
        scores = scores.masked_fill(~mask, -math.inf)
        exponentials = (scores - scores.amax(dim=-1, keepdim=True).detach()).exp()
        probabilities = exponentials / exponentials.sum(dim=-1, keepdim=True)
        return (at_least_float32(probabilities.to(v.dtype)) @ at_least_float32(v)).to(v.dtype)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates the pair (i, i + half) of each head by position x theta^(-2 i / head size)."""
        real, imaginary = at_least_float32(x).chunk(2, dim=-1)
        pairs = torch.arange(self.head_size // 2, dtype=real.dtype, device=x.device)
        frequencies = (pairs * (-2 * math.log(self.config.rope_theta) / self.head_size)).exp()
        angles = torch.outer(torch.arange(x.shape[1], dtype=real.dtype, device=x.device), frequencies)
        rotated = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((rotated.real, rotated.imag), dim=-1).to(x.dtype)

    def swiglu(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)) with silu(z) = z sigmoid(z)."""
        gated = self.product(x, gate)
        wide = at_least_float32(gated)
        return self.product((wide * wide.sigmoid()).to(gated.dtype) * self.product(x, up), down)

    def experts(self, block: Parameters, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output, the balance loss of each sequence, and the number of tokens that chose each expert."""
        config, (batch, sequence, width) = self.config, x.shape
        rows = x.reshape(-1, width)
        scores = at_least_float32(rows @ block["ffn.router.weight"].to(rows.dtype).mT)
        chosen = choose(scores.detach() + block["ffn.router.bias"], config.experts_active)
        is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
        probabilities = scores.softmax(dim=1)
        weights = (
            scores.masked_fill(~is_chosen, -math.inf).softmax(dim=1) if config.experts_active > 1 else probabilities
        )
        accepted = self.accept(chosen, is_chosen)
        bank = (block["ffn.bank.gate"], block["ffn.bank.up"], block["ffn.bank.down"])
        out = torch.zeros_like(scores[:, :1]).expand(-1, width)
        for expert, matrices in enumerate(zip(*bank, strict=True)):
            (selected,) = accepted[:, expert].nonzero(as_tuple=True)
            output = self.swiglu(rows[selected], *matrices)
            out = out.index_add(0, selected, output * weights[selected, expert, None])
        out = out.to(x.dtype).view_as(x)
        if config.experts_shared:
            out = out + self.swiglu(x, *(block[f"ffn.shared.{m}.weight"] for m in ("gate", "up", "down")))
        # arXiv:2412.19437, equations 17 to 20: f has no gradient.
        f = is_chosen.view(batch, sequence, -1).to(scores.dtype).mean(dim=1) * config.experts / config.experts_active
        balance = (f * probabilities.view(batch, sequence, -1).mean(dim=1)).sum(dim=1)
        return out, balance, is_chosen.sum(dim=0)

    def accept(self, chosen: Tensor, is_chosen: Tensor) -> Tensor:
        """Which (token, expert) are computed: of the choices of an expert, in the order of tokens, the first
        ceil(capacity factor x choices of the pass / experts).
        """
        if not self.config.capacity_factor:
            return is_chosen
        limit = math.ceil(self.config.capacity_factor * chosen.numel() / self.config.experts)
        return is_chosen & (is_chosen.cumsum(dim=0) <= limit)


def choose(scores: Tensor, active: int) -> Tensor:
    """The experts with the highest scores, best first; of equal ones the first."""
    left, chosen = scores.clone(), []
    for _ in range(active):
        best = left.argmax(dim=1, keepdim=True)
        chosen.append(best)
        left.scatter_(1, best, -math.inf)
    return torch.cat(chosen, dim=1)


def attention_mask(tokens: Tensor, separator: int | None) -> Tensor:
    """(batch or 1, 1, queries, keys): a token sees itself and the earlier tokens of its document."""
    position = torch.arange(tokens.shape[1], device=tokens.device)
    mask = (position[:, None] >= position)[None, None]
    if separator is None:
        return mask
    ended = torch.nn.functional.pad((tokens == separator).cumsum(dim=1), (1, 0))[:, :-1]
    return mask & (ended[:, None, :, None] == ended[:, None, None, :])


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    valid = labels != IGNORE_INDEX
    of_label = logits.gather(-1, labels.where(valid, 0)[..., None])[..., 0]
    return (logits.logsumexp(dim=-1) - of_label) * valid


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
