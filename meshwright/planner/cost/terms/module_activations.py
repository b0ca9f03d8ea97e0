"""Activation memory of the modules of one decoder block: norms, attention, scans and feed-forward; torch-free.

`activations` lists the tensors that each saves, and what activation checkpointing leaves of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.base.models.architecture import Architecture
from meshwright.base.models.block_kinds import BlockKind

if TYPE_CHECKING:
    from meshwright.planner.cost.terms.activations import ActivationSettings


@dataclass(frozen=True)
class ModuleActivations:
    """Bytes of attention or of the feed-forward of one block for one micro-batch."""

    saved: float
    matmul_outputs: float
    """outputs of matrix products and attention"""
    output_gradients: float
    """gradients of matmul outputs"""
    backward_peak: float = 0
    """in addition to `saved`, at the peak of backward"""
    forward_peak: float = 0
    """in addition to `saved`, at the peak of forward"""
    scores: float = 0
    attention_output: float = 0
    """the output of attention with its logsumexp"""
    matmul_inputs: float = 0
    """inputs of matmuls with weights, as they are saved"""
    pointwise: float = 0
    """the part of `saved` that norms and activation functions compute from the rest"""


def norm_activations(model: Architecture, settings: ActivationSettings, trained: float = 1.0) -> float:
    """Bytes that one norm saves in addition to its input. An eager norm computes in float32: it saves its normalized
    input so, for the gradient of its weight, and a copy of an input that has fewer bits. `trained` is the share of the
    norms whose weight is trained.
    """
    if settings.trainer.fused_kernels:
        return 4 * settings.residual_tokens
    wide = max(settings.reduction_bytes, settings.residual_bytes)
    return settings.residual_tokens * (
        (model.width * trained + 1) * wide + model.width * (wide - settings.residual_bytes)
    )


def matmul_inputs(model: Architecture, settings: ActivationSettings, matmuls: int, saving: float = 1.0) -> float:
    """Bytes that matmuls with the same input save of it; `saving` is the share of them that does."""
    layout, tokens = settings.layout, settings.tokens
    if layout.tensor > 1:
        copies = min(1.0, matmuls * saving)
        tokens = settings.residual_tokens if settings.trainer.regathers_in_backward else tokens
    else:
        casts = not settings.trainer.fused_kernels and settings.compute_bytes != settings.residual_bytes
        copies = matmuls * saving if casts else min(1.0, matmuls * saving)
    return copies * tokens * model.width * settings.input_bytes


def module_output(model: Architecture, settings: ActivationSettings) -> float:
    """The output of a tensor-parallel module: the partial sum, and with a tensor axis also the reduce-scattered sum."""
    partial = settings.tokens * model.width * settings.compute_bytes
    if settings.layout.tensor == 1:
        return partial
    return partial + settings.residual_tokens * model.width * settings.compute_bytes


def attends_by_chunks(model: Architecture, settings: ActivationSettings, kind: BlockKind) -> bool:
    """Whether Meshwright computes attention by chunks of queries, and writes its output by heads: with soft-capped
    scores, and on CPU within windows and documents, for which CUDA has a kernel.
    """
    in_window = kind.mixer == "window" and model.sliding_window < settings.sequence
    return model.capped_scores or (settings.on_cpu and (in_window or settings.has_documents))


def attention_activations(model: Architecture, settings: ActivationSettings, kind: BlockKind) -> ModuleActivations:
    layout, trainer, e = settings.layout, settings.trainer, settings.compute_bytes
    tokens = settings.tokens / layout.tensor
    ring = layout.context > 1 and settings.context_method == "ring"
    kv_ranks = layout.context if settings.context_method == "all-to-all" else 1
    if model.latent_attention is None:
        queries = values = model.heads * model.head_dim
        keys = 2 * max(model.kv_heads, min(kv_ranks * layout.tensor, model.heads)) * model.head_dim
        latent = normed_latent = 0
    else:
        mla = model.latent_attention
        queries, values = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), model.heads * mla.v_head_dim
        normed_latent = mla.q_lora_rank + mla.kv_lora_rank
        keys, latent = queries + values, 2 * normed_latent + mla.qk_rope_head_dim
    copies_output = (ring and not trainer.fused_kernels) or (settings.on_cpu and model.latent_attention is not None)
    token_layout = values if copies_output or attends_by_chunks(model, settings, kind) else 0
    logsumexp = tokens * model.heads * settings.reduction_bytes if trainer.flash_attention else 0.0
    output = tokens * values * (trainer.attention_output_bytes or e)
    qkvo = tokens * (queries + keys) * e + output + logsumexp
    recomputes_latent = latent > 0 and trainer.recomputes_latent_projections
    if recomputes_latent:
        qkvo = output + logsumexp
    scores = 0.0
    if not trainer.flash_attention:
        scores = tokens * settings.sequence / layout.context * model.heads * (2 * e + 1 if trainer.dropout_masks else e)
    projection_input = tokens * values * (trainer.attention_output_bytes or settings.input_bytes)
    shared_input = matmul_inputs(model, settings, 3, settings.trained.mixer_inputs)
    inputs = shared_input + head_norm_activations(model, settings)
    if not settings.trained.mixer_products:
        token_layout = 0
    normed = settings.tokens * normed_latent
    shares_output = trainer.attention_output_bytes or not trainer.saves_quantized_inputs
    gate = tokens * values * e if model.attention_gate else 0.0
    # The output projection saves a tensor of its own: the gated output, or the output of attention in 8 bits.
    own_input = projection_input if model.attention_gate else 0.0 if shares_output else tokens * values
    saved = inputs + qkvo + gate + tokens * token_layout * e + settings.tokens * latent * e + scores + own_input
    output_gradients = tokens * (queries + keys) * e + gate + settings.tokens * model.width * e
    materializes_scores = ring and (settings.on_cpu or settings.has_documents)
    backward_peak = tokens * (queries + keys) * e if recomputes_latent else 0.0
    if materializes_scores:
        backward_peak += 4.5 * tokens * settings.sequence / layout.context * model.heads * settings.reduction_bytes
    return ModuleActivations(
        saved,
        qkvo + gate + module_output(model, settings),
        output_gradients,
        backward_peak,
        scores=scores,
        attention_output=output + logsumexp,
        matmul_inputs=shared_input + normed * settings.input_bytes + projection_input,
        pointwise=shared_input + normed * e + (own_input if model.attention_gate else 0.0),
    )


def with_factors(module: ModuleActivations, settings: ActivationSettings) -> ModuleActivations:
    """Adds what the low-rank factors of a block save: the input of the second one. Their products are outputs of
    matmuls, too.
    """
    tokens, e, tensor = settings.tokens, settings.compute_bytes, settings.layout.tensor
    inner = outputs = 0.0
    for rank, _, width, dim, count in settings.trained.factors:
        inner += count * tokens * rank * e
        outputs += count * tokens * (width // tensor if dim == 0 else width) * e
    return replace(module, saved=module.saved + inner, matmul_outputs=module.matmul_outputs + inner + outputs)


def scan_activations(model: Architecture, settings: ActivationSettings, kind: BlockKind) -> ModuleActivations:
    """A state-space or linear-attention layer saves the outputs of its first projection, before and after the causal
    convolution, the output of the scan before and after its gate, and a float32 state per chunk.
    """
    sizes = model.linear_attention if kind.mixer == "linear" else model.state_space
    if sizes is None:
        return ModuleActivations(0.0, 0.0, 0.0)
    tokens, e = settings.tokens / settings.layout.tensor, settings.compute_bytes
    output = tokens * sizes.output_width * e
    projected = tokens * sizes.input_width * e
    states = tokens * sizes.chunk_states * settings.reduction_bytes
    saved = matmul_inputs(model, settings, 1) + projected + tokens * sizes.conv_width * e + 2 * output + states
    gradients = projected + settings.tokens * model.width * e
    return ModuleActivations(saved, projected + output + module_output(model, settings), gradients)


def head_norm_activations(model: Architecture, settings: ActivationSettings) -> float:
    """Bytes that the norms of queries and keys save: the input, the normalizer, and unfused the normalized input."""
    if not model.qk_norm:
        return 0.0
    wide, heads = settings.reduction_bytes, model.heads + model.kv_heads
    element = settings.compute_bytes + (0 if settings.trainer.fused_kernels else wide)
    return settings.tokens / settings.layout.tensor * heads * (model.head_dim * element + wide)


def inner_copies(
    model: Architecture, settings: ActivationSettings, quantized: bool, saving: float = 1.0
) -> tuple[float, float]:
    """The saved elements of a feed-forward per element of its inner width, in units of the compute precision: all of
    them, and those that the activation function computes. `quantized` if the last matmul saves its input in 8 bits,
    `saving` is the share of last matmuls that save it at all.
    """
    trainer, e = settings.trainer, settings.compute_bytes
    inputs = (model.ffn_matrices - 1) * (trainer.activation_input_bytes or e) / e
    product = saving * (settings.input_bytes / e if quantized else 1.0)
    if not model.gated:
        return inputs + product, product
    outputs = (0.0 if trainer.recomputes_gated_product else product) + (0 if trainer.fused_kernels else 1)
    return inputs + outputs, outputs


def ffn_activations(model: Architecture, settings: ActivationSettings, moe: bool) -> ModuleActivations:
    layout, e, trained = settings.layout, settings.compute_bytes, settings.trained
    up_matmuls = model.ffn_matrices - 1
    # The gradients of gate and up, and the product that their kernel writes again.
    gradient_copies = 3 if settings.trainer.recomputes_gated_product and model.gated else 2
    if not moe:
        inner = settings.tokens * model.ffn * e / layout.tensor
        copies, recomputable = inner_copies(model, settings, True, trained.ffn_products)
        inputs = matmul_inputs(model, settings, up_matmuls, trained.ffn_inputs)
        return ModuleActivations(
            inputs + copies * inner,
            up_matmuls * inner + module_output(model, settings),
            up_matmuls * inner + settings.tokens * model.width * e,
            gradient_copies * inner,
            matmul_inputs=inputs + inner * settings.input_bytes / e,
            pointwise=inputs + recomputable * inner,
        )
    routed = settings.residual_tokens * model.experts_active * settings.expert_imbalance
    if not settings.trainer.sequence_parallel and layout.tensor > 1:
        routed = routed / layout.tensor
    inner, hidden = routed * model.expert_ffn * e, routed * model.width * e
    own_copies = settings.trainer.saved_token_copies
    token_copies = (2 if layout.expert > 1 else 1) * hidden + trained.routed * hidden  # the input of trained experts
    if own_copies:  # 8-bit inputs of both matmuls of an expert
        token_copies = own_copies * hidden * settings.input_bytes / e
    copies, recomputable = inner_copies(model, settings, own_copies > 0, trained.routed)
    shared_copies, _ = inner_copies(model, settings, own_copies > 0, trained.ffn_products)
    input_share = settings.input_bytes / e if own_copies else 1.0
    experts = routed * (16 + settings.reduction_bytes) + copies * inner + token_copies
    router_input = trained.routed * settings.residual_tokens * model.width * settings.residual_bytes
    router = router_input + settings.residual_tokens * 2 * model.experts * settings.reduction_bytes
    shared = settings.tokens * model.shared_ffn * e / layout.tensor
    own_input = model.shared_ffn and (layout.tensor > 1 or settings.compute_bytes != settings.residual_bytes)
    shared_input = matmul_inputs(model, settings, 2, trained.ffn_inputs) if own_input else 0.0
    matmul_outputs = up_matmuls * inner + routed * model.width * e
    if model.shared_ffn:
        matmul_outputs += up_matmuls * shared + module_output(model, settings)
    # Backward runs shared experts first, and frees their activations before it runs the routed ones.
    return ModuleActivations(
        experts + router + shared_copies * shared + shared_input,
        matmul_outputs,
        up_matmuls * (inner + shared) + 2 * hidden,
        max(gradient_copies * shared, gradient_copies * inner - (token_copies if own_copies else 3 * hidden)),
        2 * hidden,
        matmul_inputs=(hidden + inner + shared) * input_share + router_input + shared_input,
        pointwise=recomputable * (inner + shared) + router_input + shared_input,
    )


def autocast_weights(model: Architecture, settings: ActivationSettings, kind: BlockKind) -> float:
    """Bytes of the copies that autocast makes of one block's weights."""
    if not settings.autocast:
        return 0
    layout, mixer = settings.layout, model.mixer_parameters(kind)
    e = settings.cast_share * settings.compute_bytes
    if kind.ffn != "moe":
        return (mixer + (model.ffn_parameters if kind.ffn == "dense" else 0)) / layout.tensor * e
    experts = model.experts * model.expert_parameters / layout.expert
    return ((mixer + model.shared_expert_parameters) / layout.tensor + experts) * e
