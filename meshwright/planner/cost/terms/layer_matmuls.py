"""The matrix products of one layer on one rank, for one micro-batch; `layer_time` has their formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.base.models.architecture import Architecture
from meshwright.base.models.block_kinds import BlockKind
from meshwright.planner.cost.terms.kernel_time import MatmulShape

if TYPE_CHECKING:
    from meshwright.planner.cost.terms.layer_time import LayerShape


def attention_projections(model: Architecture, shape: LayerShape) -> list[MatmulShape]:
    tensor, tokens = shape.tensor, shape.tokens
    if model.latent_attention is None:
        query_heads = (2 if model.attention_gate else 1) * model.heads
        qkv = model.head_dim * (query_heads + 2 * model.kv_heads) // tensor
        return [(tokens, max(1, qkv), model.width, 1), (tokens, model.width, model.heads * model.head_dim // tensor, 1)]
    mla = model.latent_attention
    query = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) // tensor
    matmuls = [(tokens, mla.kv_lora_rank + mla.qk_rope_head_dim, model.width, 1)]
    matmuls += (
        [(tokens, mla.q_lora_rank, model.width, 1), (tokens, query, mla.q_lora_rank, 1)]
        if mla.q_lora_rank
        else [(tokens, query, model.width, 1)]
    )
    matmuls.append((tokens, model.heads * (mla.qk_nope_head_dim + mla.v_head_dim) // tensor, mla.kv_lora_rank, 1))
    matmuls.append((tokens, model.width, model.heads * mla.v_head_dim // tensor, 1))
    return matmuls


def mixer_projections(model: Architecture, shape: LayerShape, kind: BlockKind) -> list[MatmulShape]:
    """The matrix products of a block's mixer."""
    if kind.has_attention:
        return attention_projections(model, shape)
    tokens, tensor = shape.tokens, shape.tensor
    if kind.mixer == "linear" and model.linear_attention is not None:
        sizes = model.linear_attention
        return [
            (tokens, max(1, sizes.input_width // tensor), model.width, 1),
            (tokens, model.width, sizes.values // tensor, 1),
        ]
    if kind.has_scan and model.state_space is not None:
        space = model.state_space
        inner = space.inner // tensor
        matmuls = [(tokens, max(1, space.input_width // tensor), model.width, 1), (tokens, model.width, inner, 1)]
        if space.heads:
            return matmuls
        return [*matmuls, (tokens, space.rank + 2 * space.state, inner, 1), (tokens, inner, max(1, space.rank), 1)]
    return []


def feed_forward_matmuls(model: Architecture, shape: LayerShape, kind: BlockKind) -> list[MatmulShape]:
    """The matrix products of a dense feed-forward, or of the shared experts."""
    ffn = {"dense": model.ffn, "moe": model.shared_ffn, "none": 0}[kind.ffn]
    up, tensor = model.ffn_matrices - 1, shape.tensor
    if not ffn:
        return []
    return [(shape.tokens, up * ffn // tensor, model.width, 1), (shape.tokens, model.width, ffn // tensor, 1)]


def expert_matmuls(model: Architecture, shape: LayerShape, kind: BlockKind) -> list[MatmulShape]:
    """The matrix products of a router and of the routed experts."""
    if kind.ffn != "moe":
        return []
    local_experts = max(1, model.experts // shape.expert)
    rows = max(1, routed_tokens(shape) // local_experts)
    return [
        (shape.tokens, model.experts, model.width, 1),
        (rows, (model.ffn_matrices - 1) * model.expert_ffn, model.width, local_experts),
        (rows, model.width, model.expert_ffn, local_experts),
    ]


def routed_tokens(shape: LayerShape) -> int:
    """The tokens that the experts of the busiest rank process; each tensor-parallel rank routes its own share."""
    return int(shape.tokens * shape.model.experts_active * shape.expert_imbalance) // shape.tensor
