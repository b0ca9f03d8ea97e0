"""The spec of the GPT-2 family: options, parameters, tensor-parallel plan and costs. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from meshwright.base.config import ModelConfig
from meshwright.base.config.constraints import Range
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.decoder_spec import BYTES, INIT_STD, ONES, ZEROS, require_no_experts
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
from meshwright.errors import ConfigError

POSITION_STD = 0.01
BLOCK = "decoder.blocks.*"

TP_PLAN = {
    "decoder.embedding": "vocab_embedding",
    "decoder.position": "position_embedding",
    f"{BLOCK}.attention_norm": "sequence",
    f"{BLOCK}.attention": "gather_sequence",
    f"{BLOCK}.attention.q": "colwise",
    f"{BLOCK}.attention.k": "colwise",
    f"{BLOCK}.attention.v": "colwise",
    f"{BLOCK}.attention.out": "rowwise_sequence_bias",
    f"{BLOCK}.ffn_norm": "sequence",
    f"{BLOCK}.ffn": "gather_sequence",
    f"{BLOCK}.ffn.up": "colwise",
    f"{BLOCK}.ffn.down": "rowwise_sequence_bias",
    "decoder.norm": "sequence",
    "head": "vocab_head",
}


@dataclass(frozen=True)
class GPT2Options:
    """The settings of the family itself, `[model.options]`."""

    positions: Annotated[int, Range(minimum=1, maximum=1 << 24)] = 1024
    """learned positions: the length of the longest sequence"""


OPTIONS = GPT2Options


def declare(config: ModelConfig, options: GPT2Options) -> ModelSpec:
    require_sizes(config)
    first_unit, last_unit = (ROOT, ROOT) if config.tie else (BEFORE, AFTER)
    blocks = [f"decoder.blocks.{layer}" for layer in range(config.layers)]
    table, positions = Initialization("normal", INIT_STD), Initialization("normal", POSITION_STD)
    shape = (config.vocab, config.width)
    parameters = [
        ParameterSpec("decoder.embedding.weight", shape, first_unit, 0, initialization=table),
        ParameterSpec(
            "decoder.position.weight", (options.positions, config.width), first_unit, initialization=positions
        ),
    ]
    for block in blocks:
        parameters += block_parameters(config, block)
    parameters += norm("decoder.norm", config.width, last_unit)
    if not config.tie:
        parameters.append(ParameterSpec("head.weight", shape, last_unit, 0, initialization=table))
    cost = block_cost(config)
    return ModelSpec(
        "gpt2",
        tuple(parameters),
        tuple(BlockSpec(block, cost) for block in blocks),
        before=("decoder.embedding", "decoder.position"),
        after=("decoder.norm", "head"),
        after_cost=head_cost(config),
        tied={"head.weight": "decoder.embedding.weight"} if config.tie else {},
        tp_plan=TP_PLAN,
        attention=AttentionSeam(f"{BLOCK}.attention.core"),
        architecture=architecture(config, options),
    )


def require_sizes(config: ModelConfig) -> None:
    """Raises ConfigError for a setting of another family."""
    require_no_experts(config)
    if config.kv_heads != config.heads:
        raise ConfigError(
            f"model.kv_heads = {config.kv_heads}, and the family gpt2 has a key and a value head per query head",
            f"expected model.kv_heads = {config.heads}, as model.heads",
        )
    if config.rope_theta != ModelConfig.rope_theta:
        raise ConfigError(
            f"model.rope_theta = {config.rope_theta:g}, and the family gpt2 has learned positions",
            "expected no model.rope_theta",
        )


def norm(name: str, width: int, unit: str) -> list[ParameterSpec]:
    return [
        ParameterSpec(f"{name}.weight", (width,), unit, initialization=ONES, decay=False),
        ParameterSpec(f"{name}.bias", (width,), unit, initialization=ZEROS, decay=False),
    ]


def block_parameters(config: ModelConfig, block: str) -> Iterator[ParameterSpec]:
    width = config.width
    matrix = Initialization("normal", INIT_STD)
    # Projections into the residual stream shrink with depth, so that its variance stays of order one.
    into_residual = Initialization("normal", INIT_STD / math.sqrt(2 * config.layers))

    def colwise(name: str, rows: int) -> Iterator[ParameterSpec]:
        yield ParameterSpec(f"{block}.{name}.weight", (rows, width), block, 0, initialization=matrix)
        yield ParameterSpec(f"{block}.{name}.bias", (rows,), block, 0, initialization=ZEROS, decay=False)

    def rowwise(name: str, columns: int) -> Iterator[ParameterSpec]:
        yield ParameterSpec(f"{block}.{name}.weight", (width, columns), block, 1, initialization=into_residual)
        yield ParameterSpec(f"{block}.{name}.bias", (width,), block, initialization=ZEROS, decay=False)

    yield from norm(f"{block}.attention_norm", width, block)
    for name in ("q", "k", "v"):
        yield from colwise(f"attention.{name}", width)
    yield from rowwise("attention.out", width)
    yield from norm(f"{block}.ffn_norm", width, block)
    yield from colwise("ffn.up", config.ffn)
    yield from rowwise("ffn.down", config.ffn)


def block_cost(config: ModelConfig) -> ModuleCost:
    """A norm saves its input and two statistics, every matmul its input, attention queries, keys, values, the output
    and its logsumexp, and the feed-forward its inner units before and after the activation.
    """
    width = config.width
    matrices = 4 * width * width + 2 * width * config.ffn
    saved = 2 * (width + 2) + 2 * width + 4 * width + config.heads + 2 * config.ffn
    return ModuleCost(Cost(per_token=2 * matrices, per_pair=4 * width), Cost(per_token=BYTES * saved))


def head_cost(config: ModelConfig) -> ModuleCost:
    """The last norm, the head and the loss, which saves the log-probabilities."""
    saved = config.width + 2 + config.width + config.vocab
    return ModuleCost(Cost(per_token=2 * config.width * config.vocab), Cost(per_token=BYTES * saved))


def architecture(config: ModelConfig, options: GPT2Options) -> Architecture:
    return Architecture(
        "",
        config.layers,
        config.width,
        config.heads,
        config.kv_heads,
        config.width // config.heads,
        config.ffn,
        config.vocab,
        gated=False,
        tied_embeddings=config.tie,
        norm="layer",
        bias=True,
        learned_positions=options.positions,
    )
