"""The spec of the Gemma 2 family: options, parameters, tensor-parallel plan and costs. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from meshwright.base.config import ModelConfig
from meshwright.base.config.constraints import PositiveFloat, Range
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.block_kinds import BlockKind
from meshwright.base.models.decoder_spec import BYTES, INIT_STD, require_no_experts, resolve_head_size
from meshwright.base.models.spec import (
    AFTER,
    BEFORE,
    ROOT,
    AttentionSeam,
    BlockSpec,
    Cost,
    Initialization,
    ModelSpec,
    ModuleCost,
    ParameterSpec,
)

BLOCK = "decoder.blocks.*"

TP_PLAN = {
    "decoder.embedding": "vocab_embedding",
    f"{BLOCK}.attention_norm": "sequence",
    f"{BLOCK}.attention": "gather_sequence",
    f"{BLOCK}.attention.q": "colwise",
    f"{BLOCK}.attention.k": "colwise",
    f"{BLOCK}.attention.v": "colwise",
    f"{BLOCK}.attention.out": "rowwise_sequence",
    f"{BLOCK}.attention_post_norm": "sequence_local",
    f"{BLOCK}.ffn_norm": "sequence",
    f"{BLOCK}.ffn": "gather_sequence",
    f"{BLOCK}.ffn.gate": "colwise",
    f"{BLOCK}.ffn.up": "colwise",
    f"{BLOCK}.ffn.down": "rowwise_sequence",
    f"{BLOCK}.ffn_post_norm": "sequence_local",
    "decoder.norm": "sequence",
    "head": "vocab_head",
}


@dataclass(frozen=True)
class Gemma2Options:
    """The settings of the family itself, `[model.options]`."""

    head_size: Annotated[int, Range(minimum=0, maximum=1 << 16)] = 0
    """size of one head, an even number; 0: width / heads"""
    query_scale: Annotated[float, Range(minimum=0, maximum=1e12)] = 0.0
    """scores are divided by its square root; 0: the head size"""
    attention_softcap: PositiveFloat = 50.0
    """limit of the absolute value of a score"""
    logit_softcap: PositiveFloat = 30.0
    """limit of the absolute value of a logit"""
    window: Annotated[int, Range(minimum=1, maximum=1 << 40)] = 4096
    """tokens that the first, third, ... block sees, itself included; the other blocks see all"""

    def head_dim(self, config: ModelConfig) -> int:
        return resolve_head_size(config, self.head_size)


OPTIONS = Gemma2Options


def declare(config: ModelConfig, options: Gemma2Options) -> ModelSpec:
    require_no_experts(config)
    first_unit, last_unit = (ROOT, ROOT) if config.tie else (BEFORE, AFTER)
    blocks = [f"decoder.blocks.{layer}" for layer in range(config.layers)]
    table = Initialization("normal", INIT_STD)
    parameters = [
        ParameterSpec("decoder.embedding.weight", (config.vocab, config.width), first_unit, 0, initialization=table)
    ]
    for block in blocks:
        parameters += block_parameters(config, options, block)
    parameters.append(norm("decoder.norm", config.width, last_unit))
    if not config.tie:
        parameters.append(
            ParameterSpec("head.weight", (config.vocab, config.width), last_unit, 0, initialization=table)
        )
    cost = block_cost(config, options)
    return ModelSpec(
        "gemma2",
        tuple(parameters),
        tuple(BlockSpec(block, cost) for block in blocks),
        before=("decoder.embedding",),
        after=("decoder.norm", "head"),
        after_cost=head_cost(config),
        tied={"head.weight": "decoder.embedding.weight"} if config.tie else {},
        tp_plan=TP_PLAN,
        attention=AttentionSeam(f"{BLOCK}.attention.core", is_plain=False),
        architecture=architecture(config, options),
    )


def norm(name: str, width: int, unit: str) -> ParameterSpec:
    zeros = Initialization("constant", 0.0)  # the weight is added to one
    return ParameterSpec(f"{name}.weight", (width,), unit, initialization=zeros, decay=False)


def block_parameters(config: ModelConfig, options: Gemma2Options, block: str) -> Iterator[ParameterSpec]:
    width, head_size = config.width, options.head_dim(config)
    q_width, kv_width = config.heads * head_size, config.kv_heads * head_size
    matrix = Initialization("normal", INIT_STD)
    # Projections into the residual stream shrink with depth, as in the Llama family.
    into_residual = Initialization("normal", INIT_STD / math.sqrt(2 * config.layers))

    def linear(name: str, rows: int, columns: int, tp_dim: int, values: Initialization = matrix) -> ParameterSpec:
        return ParameterSpec(f"{block}.{name}.weight", (rows, columns), block, tp_dim, initialization=values)

    yield norm(f"{block}.attention_norm", width, block)
    yield linear("attention.q", q_width, width, 0)
    yield linear("attention.k", kv_width, width, 0)
    yield linear("attention.v", kv_width, width, 0)
    yield linear("attention.out", width, q_width, 1, into_residual)
    yield norm(f"{block}.attention_post_norm", width, block)
    yield norm(f"{block}.ffn_norm", width, block)
    yield linear("ffn.gate", config.ffn, width, 0)
    yield linear("ffn.up", config.ffn, width, 0)
    yield linear("ffn.down", width, config.ffn, 1, into_residual)
    yield norm(f"{block}.ffn_post_norm", width, block)


def block_cost(config: ModelConfig, options: Gemma2Options) -> ModuleCost:
    """Every norm saves its input and its normalized input, every matmul its input, attention its output with one
    number per query and head, the feed-forward gate, up, activation and product.
    """
    width, head_size = config.width, options.head_dim(config)
    q_width, kv_width = config.heads * head_size, config.kv_heads * head_size
    matrices = 2 * width * (q_width + kv_width) + 3 * width * config.ffn
    norms = 4 * (2 * width + 1)
    saved = norms + 2 * width + 3 * q_width + 2 * kv_width + config.heads + 4 * config.ffn
    return ModuleCost(
        Cost(per_token=2 * matrices, per_pair=4 * q_width),
        Cost(per_token=BYTES * saved),
    )


def head_cost(config: ModelConfig) -> ModuleCost:
    """The last norm, the head with the tanh of its logits, and the loss with the log-probabilities."""
    saved = 3 * config.width + 1 + 2 * config.vocab
    return ModuleCost(Cost(per_token=2 * config.width * config.vocab), Cost(per_token=BYTES * saved))


def architecture(config: ModelConfig, options: Gemma2Options) -> Architecture:
    return Architecture(
        "",
        config.layers,
        config.width,
        config.heads,
        config.kv_heads,
        options.head_dim(config),
        config.ffn,
        config.vocab,
        tied_embeddings=config.tie,
        post_norms=True,
        capped_scores=True,
        capped_logits=True,
        sliding_window=options.window,
        layer_kinds=tuple(BlockKind("attention" if layer % 2 else "window") for layer in range(config.layers)),
    )
