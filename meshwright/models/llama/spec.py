"""The spec of the Llama family: parameters, tensor-parallel plan and costs. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.config import ModelConfig
from meshwright.models.architecture import Architecture
from meshwright.models.spec import (
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

INIT_STD = 0.02
ONES, ZEROS = Initialization("constant", 1.0), Initialization("constant", 0.0)
BYTES = 4
"""of an activation in float32"""


@dataclass(frozen=True)
class LlamaOptions:
    """The family has no settings besides those of every model."""


OPTIONS = LlamaOptions


def declare(config: ModelConfig, _options: LlamaOptions) -> ModelSpec:
    first_unit, last_unit = (ROOT, ROOT) if config.tie else (BEFORE, AFTER)
    blocks = [f"decoder.blocks.{layer}" for layer in range(config.layers)]
    matrix, norm = Initialization("normal", INIT_STD), ONES
    parameters = [
        ParameterSpec("decoder.embedding.weight", (config.vocab, config.width), first_unit, 0, initialization=matrix)
    ]
    for block in blocks:
        parameters += block_parameters(config, block)
    parameters.append(
        ParameterSpec("decoder.norm.weight", (config.width,), last_unit, initialization=norm, decay=False)
    )
    if not config.tie:
        parameters.append(
            ParameterSpec("head.weight", (config.vocab, config.width), last_unit, 0, initialization=matrix)
        )
    cost = block_cost(config)
    return ModelSpec(
        "llama",
        tuple(parameters),
        tuple(BlockSpec(block, cost) for block in blocks),
        before=("decoder.embedding",),
        after=("decoder.norm", "head"),
        after_cost=head_cost(config),
        buffers=tuple(
            BufferSpec(f"{block}.ffn.router.bias", (config.experts,), ZEROS) for block in blocks if config.experts
        ),
        tied={"head.weight": "decoder.embedding.weight"} if config.tie else {},
        tp_plan=tp_plan(config),
        attention=AttentionSeam("decoder.blocks.*.attention.core"),
        architecture=architecture(config),
    )


def block_parameters(config: ModelConfig, block: str) -> Iterator[ParameterSpec]:
    width, kv_width = config.width, config.kv_heads * (config.width // config.heads)
    matrix = Initialization("normal", INIT_STD)
    # Projections into the residual stream shrink with depth, so that its variance stays of order one.
    into_residual = Initialization("normal", INIT_STD / math.sqrt(2 * config.layers))

    def norm(name: str) -> ParameterSpec:
        return ParameterSpec(f"{block}.{name}.weight", (width,), block, initialization=ONES, decay=False)

    def linear(name: str, rows: int, columns: int, tp_dim: int, values: Initialization = matrix) -> ParameterSpec:
        return ParameterSpec(f"{block}.{name}.weight", (rows, columns), block, tp_dim, initialization=values)

    def feed_forward(name: str, inner: int) -> Iterator[ParameterSpec]:
        yield linear(f"{name}.gate", inner, width, 0)
        yield linear(f"{name}.up", inner, width, 0)
        yield linear(f"{name}.down", width, inner, 1, into_residual)

    yield norm("attention_norm")
    yield linear("attention.q", width, width, 0)
    yield linear("attention.k", kv_width, width, 0)
    yield linear("attention.v", kv_width, width, 0)
    yield linear("attention.out", width, width, 1, into_residual)
    yield norm("ffn_norm")
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


def tp_plan(config: ModelConfig) -> Mapping[str, str]:
    """Shared experts are sharded; routed experts process the tokens of the local sequence chunk."""
    block = "decoder.blocks.*"
    dense = [f"{block}.ffn"] if not config.experts else [f"{block}.ffn.shared"] if config.experts_shared else []
    return {
        "decoder.embedding": "vocab_embedding",
        f"{block}.attention_norm": "sequence",
        f"{block}.attention": "gather_sequence",
        **{f"{block}.attention.{name}": "colwise" for name in ("q", "k", "v")},
        f"{block}.attention.out": "rowwise_sequence",
        f"{block}.ffn_norm": "sequence",
        **({f"{block}.ffn": "local_sequence"} if config.experts else {}),
        **dict.fromkeys(dense, "gather_sequence"),
        **{f"{ffn}.{name}": "colwise" for ffn in dense for name in ("gate", "up")},
        **{f"{ffn}.down": "rowwise_sequence" for ffn in dense},
        "decoder.norm": "sequence",
        "head": "vocab_head",
    }


def block_cost(config: ModelConfig) -> ModuleCost:
    """Attention saves the inputs of its norm and matmuls, queries, keys, values, the output twice and its logsumexp; a
    feed-forward saves gate, up, activation and product per inner unit.
    """
    width, kv_width = config.width, config.kv_heads * (config.width // config.heads)
    projections, experts = 2 * width * (width + kv_width), config.experts_active + config.experts_shared
    feed_forward = 3 * width * config.ffn * (experts if config.experts else 1)
    flops = Cost(per_token=2 * (projections + feed_forward + width * config.experts), per_pair=4 * width)
    attention = 2 * width + 1 + width + 3 * width + 2 * kv_width + config.heads
    if not config.experts:
        inner = 2 * width + 1 + width + 4 * config.ffn
    else:
        inner = 2 * width + 1 + width + 2 * config.experts + config.experts_active * (3 * width + 4 * config.ffn + 5)
        inner += 4 * config.experts_shared * config.ffn
    return ModuleCost(flops, Cost(per_token=BYTES * (attention + inner)))


def head_cost(config: ModelConfig) -> ModuleCost:
    """The last norm, the head and the loss, which saves the log-probabilities."""
    saved = 2 * config.width + 1 + config.width + config.vocab
    return ModuleCost(Cost(per_token=2 * config.width * config.vocab), Cost(per_token=BYTES * saved))


def architecture(config: ModelConfig) -> Architecture:
    return Architecture(
        "",
        config.layers,
        config.width,
        config.heads,
        config.kv_heads,
        config.width // config.heads,
        config.ffn,
        config.vocab,
        tied_embeddings=config.tie,
        experts=config.experts,
        experts_active=config.experts_active if config.experts else 0,
        experts_shared=config.experts_shared,
        expert_ffn=config.ffn if config.experts else 0,
    )
