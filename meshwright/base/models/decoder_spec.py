"""The spec of the decoders that vary Llama's: parameters, tensor-parallel plan and costs. Torch-free.

A decoder has RMSNorm, rotary positions, grouped-query attention, and SwiGLU or experts; `DecoderVariant` says what a
family adds. `models/layers/decoder.py` has the modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from meshwright.base.config import ModelConfig
from meshwright.base.config.constraints import Range
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.routing import Routing
from meshwright.base.models.spec import (
    AFTER,
    BEFORE,
    ROOT,
    AttentionSeam,
    BlockSpec,
    BufferSpec,
    Cost,
    Initialization,
    ModelSpec,
    ModuleCost,
    ParameterSpec,
)
from meshwright.errors import ConfigError

INIT_STD = 0.02
ONES, ZEROS = Initialization("constant", 1.0), Initialization("constant", 0.0)
BYTES = 4
"""of an activation in float32"""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are lowered for sequences that are longer than those of the first training."""

    kind: Literal["linear", "llama3", "yarn"]
    """`linear` divides all frequencies by `factor`; `llama3` and `yarn` divide the low ones, and keep the high ones"""
    factor: float
    low_frequency_factor: float
    """a frequency is low if its wavelength is above original_context / low_frequency_factor tokens"""
    high_frequency_factor: float
    """a frequency is high if its wavelength is below original_context / high_frequency_factor tokens"""
    original_context: int
    """tokens of the sequences of the first training"""
    amplitude: float = 1.0
    """factor of cosine and sine"""


@dataclass(frozen=True)
class DecoderVariant:
    """What the decoder of a family has besides the sizes of every model."""

    head_size: int
    qkv_bias: bool = False
    """whether the query, key and value projections have biases"""
    qk_norm: bool = False
    """whether queries and keys are normalized per head, before rotation"""
    window: int | None = None
    """tokens that attention looks back, the own one included; None: all"""
    rope_scaling: RopeScaling | None = None
    routing: Routing | None = None
    """how experts are chosen and weighted; None: as in Llama with experts"""


HeadSize = Annotated[int, Range(minimum=0, maximum=1 << 16)]
"""The option of families with a head size of their own."""
Window = Annotated[int, Range(minimum=0, maximum=1 << 40)]
"""The option of families with a sliding window."""


def resolve_head_size(config: ModelConfig, option: int = 0) -> int:
    """The head size that the option of a family says; 0: width / heads."""
    if option % 2:
        raise ConfigError(f"model.options.head_size = {option} is odd", "expected an even number")
    return option or config.width // config.heads


def require_no_experts(config: ModelConfig) -> None:
    """Raises ConfigError if a dense family is configured with experts."""
    if config.experts:
        raise ConfigError(
            f"model.experts = {config.experts}, and the family {config.family} has no experts",
            "try model.experts = 0, or model.family = llama",
        )


def declare_decoder(config: ModelConfig, variant: DecoderVariant) -> ModelSpec:
    first_unit, last_unit = (ROOT, ROOT) if config.tie else (BEFORE, AFTER)
    blocks = [f"decoder.blocks.{layer}" for layer in range(config.layers)]
    matrix, norm = Initialization("normal", INIT_STD), ONES
    parameters = [
        ParameterSpec("decoder.embedding.weight", (config.vocab, config.width), first_unit, 0, initialization=matrix)
    ]
    for block in blocks:
        parameters += block_parameters(config, variant, block)
    parameters.append(
        ParameterSpec("decoder.norm.weight", (config.width,), last_unit, initialization=norm, decay=False)
    )
    if not config.tie:
        parameters.append(
            ParameterSpec("head.weight", (config.vocab, config.width), last_unit, 0, initialization=matrix)
        )
    cost = block_cost(config, variant)
    return ModelSpec(
        config.family,
        tuple(parameters),
        tuple(BlockSpec(block, cost) for block in blocks),
        before=("decoder.embedding",),
        after=("decoder.norm", "head"),
        after_cost=head_cost(config),
        buffers=tuple(
            BufferSpec(f"{block}.ffn.router.bias", (config.experts,), ZEROS) for block in blocks if config.experts
        ),
        tied={"head.weight": "decoder.embedding.weight"} if config.tie else {},
        tp_plan=tp_plan(config, variant),
        attention=AttentionSeam("decoder.blocks.*.attention.core", is_plain=variant.window is None),
        architecture=architecture(config, variant),
    )


def block_parameters(config: ModelConfig, variant: DecoderVariant, block: str) -> Iterator[ParameterSpec]:
    width, q_width, kv_width = config.width, config.heads * variant.head_size, config.kv_heads * variant.head_size
    matrix = Initialization("normal", INIT_STD)
    # Projections into the residual stream shrink with depth, so that its variance stays of order one.
    into_residual = Initialization("normal", INIT_STD / math.sqrt(2 * config.layers))

    def norm(name: str, size: int) -> ParameterSpec:
        return ParameterSpec(f"{block}.{name}.weight", (size,), block, initialization=ONES, decay=False)

    def linear(name: str, rows: int, columns: int, tp_dim: int, values: Initialization = matrix) -> ParameterSpec:
        return ParameterSpec(f"{block}.{name}.weight", (rows, columns), block, tp_dim, initialization=values)

    def projection(name: str, rows: int) -> Iterator[ParameterSpec]:
        yield linear(name, rows, width, 0)
        if variant.qkv_bias:
            yield ParameterSpec(f"{block}.{name}.bias", (rows,), block, 0, initialization=ZEROS, decay=False)

    def feed_forward(name: str, inner: int) -> Iterator[ParameterSpec]:
        yield linear(f"{name}.gate", inner, width, 0)
        yield linear(f"{name}.up", inner, width, 0)
        yield linear(f"{name}.down", width, inner, 1, into_residual)

    yield norm("attention_norm", width)
    yield from projection("attention.q", q_width)
    yield from projection("attention.k", kv_width)
    yield from projection("attention.v", kv_width)
    if variant.qk_norm:
        yield norm("attention.q_norm", variant.head_size)
        yield norm("attention.k_norm", variant.head_size)
    yield linear("attention.out", width, q_width, 1, into_residual)
    yield norm("ffn_norm", width)
    if not config.experts:
        yield from feed_forward("ffn", config.ffn)
        return
    yield ParameterSpec(f"{block}.ffn.router.weight", (config.experts, width), block, initialization=matrix)
    for name, rows, columns, values in (
        ("gate", config.ffn, width, matrix),
        ("up", config.ffn, width, matrix),
        ("down", width, config.ffn, into_residual),
    ):
        shape = (config.experts, rows, columns)
        yield ParameterSpec(f"{block}.ffn.bank.{name}", shape, block, is_expert_weight=True, initialization=values)
    if config.experts_shared:  # tensor parallelism shards only these experts, which process every token
        yield from feed_forward("ffn.shared", config.experts_shared * config.ffn)


def tp_plan(config: ModelConfig, variant: DecoderVariant) -> Mapping[str, str]:
    """Shared experts are sharded; routed experts process the tokens of the local sequence chunk."""
    block = "decoder.blocks.*"
    dense = [f"{block}.ffn"] if not config.experts else [f"{block}.ffn.shared"] if config.experts_shared else []
    return {
        "decoder.embedding": "vocab_embedding",
        f"{block}.attention_norm": "sequence",
        f"{block}.attention": "gather_sequence",
        **{f"{block}.attention.{name}": "colwise" for name in ("q", "k", "v")},
        **{f"{block}.attention.{name}": "heads" for name in ("q_norm", "k_norm") if variant.qk_norm},
        f"{block}.attention.out": "rowwise_sequence",
        f"{block}.ffn_norm": "sequence",
        **({f"{block}.ffn": "local_sequence"} if config.experts else {}),
        **dict.fromkeys(dense, "gather_sequence"),
        **{f"{ffn}.{name}": "colwise" for ffn in dense for name in ("gate", "up")},
        **{f"{ffn}.down": "rowwise_sequence" for ffn in dense},
        "decoder.norm": "sequence",
        "head": "vocab_head",
    }


def block_cost(config: ModelConfig, variant: DecoderVariant) -> ModuleCost:
    """Attention saves the inputs of its norm and matmuls, queries, keys, values, the output and its logsumexp; in a
    window, the output by heads and by tokens. Norms of queries and keys save as every norm does; a feed-forward saves
    gate, up, activation and product per inner unit.
    """
    width, q_width, kv_width = config.width, config.heads * variant.head_size, config.kv_heads * variant.head_size
    projections, experts = 2 * width * (q_width + kv_width), config.experts_active + config.experts_shared
    feed_forward = 3 * width * config.ffn * (experts if config.experts else 1)
    flops = Cost(per_token=2 * (projections + feed_forward + width * config.experts), per_pair=4 * q_width)
    outputs = 1 if variant.window is None else 2
    attention = 2 * width + 1 + width + (1 + outputs) * q_width + 2 * kv_width + config.heads
    if variant.qk_norm:
        attention += 2 * (q_width + kv_width) + config.heads + config.kv_heads
    if not config.experts:
        inner = 2 * width + 1 + width + 4 * config.ffn
    else:
        inner = 2 * width + 1 + width + 2 * config.experts + config.experts_active * (2 * width + 4 * config.ffn + 5)
        inner += 4 * config.experts_shared * config.ffn
    return ModuleCost(flops, Cost(per_token=BYTES * (attention + inner)))


def head_cost(config: ModelConfig) -> ModuleCost:
    """The last norm, the head and the loss, which saves the log-probabilities."""
    saved = 2 * config.width + 1 + config.width + config.vocab
    return ModuleCost(Cost(per_token=2 * config.width * config.vocab), Cost(per_token=BYTES * saved))


def architecture(config: ModelConfig, variant: DecoderVariant) -> Architecture:
    return Architecture(
        "",
        config.layers,
        config.width,
        config.heads,
        config.kv_heads,
        variant.head_size,
        config.ffn,
        config.vocab,
        tied_embeddings=config.tie,
        qkv_bias=variant.qkv_bias,
        qk_norm=variant.qk_norm,
        sliding_window=variant.window or 0,
        experts=config.experts,
        experts_active=config.experts_active if config.experts else 0,
        expert_ffn=config.ffn if config.experts else 0,
        shared_ffn=config.experts_shared * config.ffn if config.experts else 0,
    )
