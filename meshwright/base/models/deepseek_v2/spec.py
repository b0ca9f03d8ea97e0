"""The spec of the DeepSeek-V2 family: parameters, tensor-parallel plan and costs. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from meshwright.base.config import ModelConfig
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.decoder_spec import BYTES, INIT_STD, ONES, ZEROS, head_cost
from meshwright.base.models.deepseek_v2.options import DeepSeekV2Options, validate
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

OPTIONS = DeepSeekV2Options
MATRIX = Initialization("normal", INIT_STD)
BLOCK = "decoder.blocks.*"


def declare(config: ModelConfig, options: DeepSeekV2Options) -> ModelSpec:
    validate(config, options)
    first_unit, last_unit = (ROOT, ROOT) if config.tie else (BEFORE, AFTER)
    blocks = [f"decoder.blocks.{layer}" for layer in range(config.layers)]
    table = (config.vocab, config.width)
    parameters = [ParameterSpec("decoder.embedding.weight", table, first_unit, 0, initialization=MATRIX)]
    for layer, block in enumerate(blocks):
        parameters += BlockParameters(config, options, block).of_layer(layer)
    parameters.append(
        ParameterSpec("decoder.norm.weight", (config.width,), last_unit, initialization=ONES, decay=False)
    )
    if not config.tie:
        parameters.append(ParameterSpec("head.weight", table, last_unit, 0, initialization=MATRIX))
    dense, moe = block_cost(config, options, moe=False), block_cost(config, options, moe=True)
    return ModelSpec(
        "deepseek_v2",
        tuple(parameters),
        tuple(BlockSpec(block, dense if layer < options.dense_layers else moe) for layer, block in enumerate(blocks)),
        before=("decoder.embedding",),
        after=("decoder.norm", "head"),
        after_cost=head_cost(config),
        buffers=tuple(
            BufferSpec(f"{block}.ffn.router.bias", (config.experts,), ZEROS) for block in blocks[options.dense_layers :]
        ),
        tied={"head.weight": "decoder.embedding.weight"} if config.tie else {},
        tp_plan=tp_plan(config, options),
        attention=AttentionSeam(f"{BLOCK}.attention.core"),
        architecture=architecture(config, options),
    )


class BlockParameters:
    """The parameters of one block."""

    def __init__(self, config: ModelConfig, options: DeepSeekV2Options, block: str) -> None:
        self.config, self.options, self.block = config, options, block
        self.sizes = options.latent_attention(config)
        # Projections into the residual stream shrink with depth, so that its variance stays of order one.
        self.into_residual = Initialization("normal", INIT_STD / math.sqrt(2 * config.layers))

    def of_layer(self, layer: int) -> Iterator[ParameterSpec]:
        config = self.config
        yield self.norm("attention_norm", config.width)
        yield from self.attention()
        yield self.norm("ffn_norm", config.width)
        if layer < self.options.dense_layers:
            yield from self.feed_forward("dense_ffn", self.options.dense_inner(config))
        else:
            yield from self.experts()

    def attention(self) -> Iterator[ParameterSpec]:
        config, sizes = self.config, self.sizes
        query_width = config.heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim)
        if sizes.q_lora_rank:
            yield self.linear("attention.q_down", sizes.q_lora_rank, config.width, None)
            yield self.norm("attention.q_norm", sizes.q_lora_rank)
            yield self.linear("attention.q_up", query_width, sizes.q_lora_rank, 0)
        else:
            yield self.linear("attention.q", query_width, config.width, 0)
        yield self.linear("attention.kv_down", sizes.kv_lora_rank + sizes.qk_rope_head_dim, config.width, None)
        yield self.norm("attention.kv_norm", sizes.kv_lora_rank)
        up_width = config.heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        yield self.linear("attention.kv_up", up_width, sizes.kv_lora_rank, 0)
        yield self.linear("attention.out", config.width, config.heads * sizes.v_head_dim, 1, self.into_residual)

    def experts(self) -> Iterator[ParameterSpec]:
        config, block = self.config, self.block
        router = (config.experts, config.width)
        yield ParameterSpec(f"{block}.ffn.router.weight", router, block, initialization=MATRIX)
        for name, rows, columns, values in (
            ("gate", config.ffn, config.width, MATRIX),
            ("up", config.ffn, config.width, MATRIX),
            ("down", config.width, config.ffn, self.into_residual),
        ):
            shape = (config.experts, rows, columns)
            yield ParameterSpec(f"{block}.ffn.bank.{name}", shape, block, is_expert_weight=True, initialization=values)
        if config.experts_shared:
            yield from self.feed_forward("ffn.shared", config.experts_shared * config.ffn)

    def feed_forward(self, name: str, inner: int) -> Iterator[ParameterSpec]:
        yield self.linear(f"{name}.gate", inner, self.config.width, 0)
        yield self.linear(f"{name}.up", inner, self.config.width, 0)
        yield self.linear(f"{name}.down", self.config.width, inner, 1, self.into_residual)

    def norm(self, name: str, width: int) -> ParameterSpec:
        return ParameterSpec(f"{self.block}.{name}.weight", (width,), self.block, initialization=ONES, decay=False)

    def linear(
        self, name: str, rows: int, columns: int, tp_dim: int | None, values: Initialization = MATRIX
    ) -> ParameterSpec:
        return ParameterSpec(f"{self.block}.{name}.weight", (rows, columns), self.block, tp_dim, initialization=values)


def tp_plan(config: ModelConfig, options: DeepSeekV2Options) -> Mapping[str, str]:
    """Heads are sharded. Every rank compresses the full sequence for its heads, so the gradients of the compression are
    partial sums, as those of a norm of a sequence chunk. Routed experts process the tokens of the local chunk.
    """
    compressed = ["q_down", "q_norm"] if options.q_lora_rank else []
    dense = [f"{BLOCK}.dense_ffn"] if options.dense_layers else []
    dense += [f"{BLOCK}.ffn.shared"] if config.experts_shared else []
    return {
        "decoder.embedding": "vocab_embedding",
        f"{BLOCK}.attention_norm": "sequence",
        f"{BLOCK}.attention": "gather_local_sequence",
        **{f"{BLOCK}.attention.{name}": "sequence_local" for name in (*compressed, "kv_down", "kv_norm")},
        **{f"{BLOCK}.attention.{name}": "colwise_local" for name in ("q_up" if compressed else "q", "kv_up")},
        f"{BLOCK}.attention.out": "rowwise_sequence",
        f"{BLOCK}.ffn_norm": "sequence",
        f"{BLOCK}.ffn": "local_sequence",
        **dict.fromkeys(dense, "gather_sequence"),
        **{f"{ffn}.{name}": "colwise" for ffn in dense for name in ("gate", "up")},
        **{f"{ffn}.down": "rowwise_sequence" for ffn in dense},
        "decoder.norm": "sequence",
        "head": "vocab_head",
    }


def block_cost(config: ModelConfig, options: DeepSeekV2Options, *, moe: bool) -> ModuleCost:
    """A norm saves its input and its normalized input, every matmul its input, attention queries, keys, values, the
    output and its logsumexp, values and output with the size of keys; a feed-forward saves gate, up, activation and
    product per inner unit.
    """
    width, sizes, model = config.width, options.latent_attention(config), architecture(config, options)
    head_size = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    matrices = model.active_matrix_parameters(config.layers - 1 if moe else 0)
    flops = Cost(per_token=2 * matrices, per_pair=4 * config.heads * head_size)
    norms = 2 * (2 * width + 1) + 2 * width
    latents = 3 * sizes.kv_lora_rank + 1 + (3 * sizes.q_lora_rank + 1 if sizes.q_lora_rank else 0)
    attention = latents + config.heads * (4 * head_size + sizes.v_head_dim + 1)
    inner = 4 * options.dense_inner(config)
    if moe:
        inner = 2 * config.experts + config.experts_active * (2 * width + 4 * config.ffn + 5)
        inner += config.experts + 4 * config.experts_shared * config.ffn
    return ModuleCost(flops, Cost(per_token=BYTES * (norms + attention + inner)))


def architecture(config: ModelConfig, options: DeepSeekV2Options) -> Architecture:
    sizes = options.latent_attention(config)
    return Architecture(
        "",
        config.layers,
        config.width,
        config.heads,
        config.kv_heads,
        sizes.qk_nope_head_dim + sizes.qk_rope_head_dim,
        options.dense_inner(config),
        config.vocab,
        tied_embeddings=config.tie,
        experts=config.experts,
        experts_active=config.experts_active,
        expert_ffn=config.ffn,
        shared_ffn=config.experts_shared * config.ffn,
        dense_layers=options.dense_layers,
        latent_attention=sizes,
    )
