"""The decoder as its definition says: parameters by name, tokens and labels -> token losses.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, routed and shared experts. It is compared with
`meshwright/core/models`, and so uses other formulations, in plain tensor operations: rotation by complex numbers,
explicit masks and softmax, cross-entropy by logsumexp, one expert after the other. In low precision, the inputs and
outputs of matrix products are rounded as under autocast; norms, softmax, router and loss are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.base.config import IGNORE_INDEX, ModelConfig
from meshwright.prover.oracle.float8 import rounded_product
from meshwright.prover.oracle.long_attention import LongAttention

Parameters = dict[str, Tensor]

ROPE_DEFAULTS: dict[str, str | float] = {
    "rope_scaling": "none",
    "rope_factor": 8.0,
    "rope_low_frequency_factor": 1.0,
    "rope_high_frequency_factor": 4.0,
    "rope_original_context": 8192,
}
"""The options of the Llama family that a run file need not say."""

LONG_SEQUENCE = 512
"""Above this length, attention is computed for some queries at a time, and again in backward."""


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
    """The functions of a decoder of one config. `low` is the dtype of matrix products, or None; with `float8`, those of
    dense layers in blocks are in float8.
    """

    def __init__(self, config: ModelConfig, low: torch.dtype | None = None, float8: bool = False) -> None:
        self.config, self.low, self.float8 = config, low, float8
        self.head_size = config.width // config.heads

    def forward(
        self, parameters: Parameters, tokens: Tensor, labels: Tensor, documents: Tensor | None = None
    ) -> ForwardPass:
        x = parameters["decoder.embedding.weight"][tokens]
        documents = document_of(tokens, self.config.separator) if documents is None else documents
        rotation = self.rotation(tokens.shape[1], at_least_float32(x).dtype)
        loads: dict[str, Tensor] = {}
        balance = x.new_zeros(len(tokens))
        for index, block in enumerate(split_into_blocks(parameters)):
            x = x + self.attention(block, self.norm(x, block["attention_norm.weight"]), rotation, documents)
            normalized = self.norm(x, block["ffn_norm.weight"])
            if not self.config.experts:
                x = x + self.swiglu(normalized, *(block[f"ffn.{m}.weight"] for m in ("gate", "up", "down")))
                continue
            out, block_balance, loads[f"decoder.blocks.{index}.ffn.router.bias"] = self.experts(block, normalized)
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

    def dense_product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """The same in a dense layer of a block."""
        if self.low is None or not self.float8:
            return self.product(x, matrix)
        return rounded_product(x.to(self.low), matrix.to(self.low))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """x / sqrt(mean of squares + eps) * weight."""
        wide = at_least_float32(x)
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        return (wide * (mean_square + self.config.norm_eps).rsqrt()).to(x.dtype) * weight

    def attention(self, block: Parameters, x: Tensor, rotation: Tensor, documents: Tensor) -> Tensor:
        """Queries, keys and values are one product, and queries and keys are rotated together."""
        heads, kv_heads = self.config.heads, self.config.kv_heads
        weights = torch.cat([block[f"attention.{name}.weight"] for name in "qkv"])
        projected = self.dense_product(x, weights).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q, k = rotate(projected[:, : heads + kv_heads], rotation).split((heads, kv_heads), dim=1)
        shared_by = torch.arange(heads, device=x.device) // (heads // kv_heads)  # the key head of each query head
        mixed = self.attend(q, k[:, shared_by], projected[:, heads + kv_heads :][:, shared_by], documents)
        return self.dense_product(mixed.transpose(1, 2).flatten(2), block["attention.out.weight"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        """softmax(q k / sqrt(head size)) v over (batch, heads, sequence, head size); scores are float32 at least. A
        token sees itself and the earlier tokens of its document. Low precision is rounded as by fused kernels.
        """
        scaled, keys, values = at_least_float32(q) / math.sqrt(self.head_size), at_least_float32(k), at_least_float32(v)
        if q.shape[2] > LONG_SEQUENCE or v.dtype.itemsize == 2:
            samples = [
                torch.stack([LongAttention.apply(*head, documents[i], v.dtype) for head in zip(*tensors, strict=True)])  # type: ignore[no-untyped-call]
                for i, tensors in enumerate(zip(scaled, keys, values, strict=True))
            ]
            return torch.stack(samples).to(v.dtype)
        position = torch.arange(q.shape[2], device=q.device)
        hidden = (position[:, None] < position) | (documents[:, None, :, None] != documents[:, None, None, :])
        probabilities = (scaled @ keys.mT).masked_fill(hidden, -math.inf).softmax(dim=-1)
        return probabilities @ values

    def rotation(self, sequence: int, dtype: torch.dtype) -> Tensor:
        """exp(i position theta^(-2 pair / head size)), (sequence, head size / 2), with scaled frequencies if the model
        has them.
        """
        pairs = torch.arange(self.head_size // 2, dtype=dtype)
        frequencies = (pairs * (-2 * math.log(self.config.rope_theta) / self.head_size)).exp()
        angles = torch.outer(torch.arange(sequence, dtype=dtype), self.scaled(frequencies))
        return torch.polar(torch.ones_like(angles), angles)

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Linear scaling divides all frequencies. That of Llama 3.1 divides those with a wavelength above one limit,
        keeps those below another, and interpolates between the two.
        """
        settings: dict[str, str | float] = {**ROPE_DEFAULTS, **self.config.options}
        factor, context = float(settings["rope_factor"]), float(settings["rope_original_context"])
        if settings["rope_scaling"] == "none":
            return frequencies
        divided = frequencies / factor
        if settings["rope_scaling"] == "linear":
            return divided
        low, high = (float(settings[f"rope_{name}_frequency_factor"]) for name in ("low", "high"))
        wavelength = 2 * math.pi / frequencies
        share = (context / wavelength - low) / (high - low)
        between = torch.where(wavelength < context / high, frequencies, (1 - share) * divided + share * frequencies)
        return torch.where(wavelength > context / low, divided, between)

    def swiglu(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, routed: bool = False) -> Tensor:
        """down(silu(gate(x)) * up(x)); gate and up are one product."""
        product = self.product if routed else self.dense_product
        gated, linear = product(x, torch.cat((gate, up))).chunk(2, dim=-1)
        return product(torch.nn.functional.silu(gated) * linear, down)

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
            output = self.swiglu(rows[selected], *matrices, routed=True)
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


def split_into_blocks(parameters: Parameters) -> list[Parameters]:
    """The parameters of every block, under their names in it."""
    blocks: dict[int, Parameters] = {}
    for name, value in parameters.items():
        if name.startswith("decoder.blocks."):
            index, name_in_block = name.removeprefix("decoder.blocks.").split(".", 1)
            blocks.setdefault(int(index), {})[name_in_block] = value
    return [blocks[index] for index in range(len(blocks))]


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Multiplies the pairs (i, i + half) of each head, as complex numbers, by those of the rotation."""
    rotated = torch.complex(*at_least_float32(x).chunk(2, dim=-1)) * rotation
    return torch.cat((rotated.real, rotated.imag), dim=-1).to(x.dtype)


def document_of(tokens: Tensor, separator: int | None) -> Tensor:
    """The number of documents that a separator has ended before each token."""
    if separator is None:
        return torch.zeros_like(tokens)
    return torch.nn.functional.pad((tokens == separator).cumsum(dim=1), (1, 0))[:, :-1]


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    valid = labels != IGNORE_INDEX
    of_label = logits.gather(-1, labels.where(valid, 0)[..., None])[..., 0]
    return (logits.logsumexp(dim=-1) - of_label) * valid


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
