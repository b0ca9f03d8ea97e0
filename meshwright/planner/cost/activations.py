"""Activation memory of one decoder block and of the head, for one micro-batch; torch-free.

On one rank: T is the number of tokens of its sequence chunks, t the tensor-parallel degree (P = T / t tokens between
tensor-parallel modules with sequence parallelism, otherwise P = T), W the width, H query and K key heads of size D, F
the inner width, V the vocabulary, e the bytes of the compute dtype, r the bytes of the residual stream. Bytes saved for
backward:

| tensor | eager | fused |
|---|---|---|
| inputs of both norms | 2 P W r | the same |
| normalizers and normalized inputs | 2 P (W + 1) r | 8 P |
| inputs of matmuls | T W e for q k v, and for gate and up; under autocast a copy for every matmul | one each |
| queries, keys, values, output | T (2 H + 2 K) D e / t, and T H r / t of logsumexp | the same |
| norms of queries and keys | T (H + K) (D (e + 4) + 4) / t | T (H + K) (D e + 4) / t |
| output in token layout | T H D e / t with ring attention, and on CPU with latent attention | none |
| scores, without flash attention | T S H e / t; with dropout 2 e + 1 instead of e | the same |
| gated feed-forward | 4 T F e / t: gate, up, activation and their product | 3 T F e / t |
| plain feed-forward | 2 T F e / t | the same |
| dropout masks | 2 P W | the same |
| weights under autocast | all matrices, e / t | none |

A mixture of experts routes P tokens to `experts_active` experts each, uniformly. Instead of the feed-forward, a routed
token saves 2 W e (3 W e with expert parallelism) and 4 F e, and every token saves the router's input and scores.
Megatron keeps what it all-gathers again in backward as local shards.

| activation checkpointing | saved per block | in addition during backward |
|---|---|---|
| none | everything | gradients: P W r and 2 T F e / t |
| selective, matmuls | the input, every matmul output, attention | what was not saved, and gradients |
| selective, alternate matmuls | every other matmul output | the same |
| selective, all but scores | everything except scores | the same |
| full | the input of each segment | everything of a segment, and gradients |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, singledispatch
from typing import Any

from meshwright.config.dtypes import COMPUTE_BYTES
from meshwright.models.architecture import Architecture
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.planner.workload.trainer_profiles import LOSS_CHUNK_TOKENS
from meshwright.topology.layout import Layout

ACTIVATION_BYTES = {**COMPUTE_BYTES, "fp8": 2, "fp4": 2}
"""Bytes per element of an activation, by precision: fp8 and fp4 are used inside matmuls only."""


@dataclass(frozen=True)
class ActivationSettings:
    """What activation memory depends on besides the architecture. Hashable: equal settings are computed once."""

    layout: Layout
    trainer: TrainerProfile
    micro_batch: int
    sequence: int
    precision: str
    activation_checkpoint: str
    segment: int
    context_method: str
    on_cpu: bool = False
    """on CPU, attention writes its output by heads and copies it to token layout"""
    has_documents: bool = False
    """sequences contain several documents, across which attention does not reach"""
    autocast: bool = False
    """weights are cast when they are used, and the copies are kept"""

    @property
    def tokens(self) -> float:
        return self.micro_batch * self.sequence / self.layout.context

    @property
    def residual_tokens(self) -> float:
        """Tokens of the residual stream on one rank, between tensor-parallel modules."""
        return self.tokens / self.layout.tensor if self.trainer.sequence_parallel else self.tokens

    @property
    def compute_bytes(self) -> float:
        return ACTIVATION_BYTES[self.precision]

    @property
    def residual_bytes(self) -> float:
        """Bytes per element of the residual stream."""
        return (
            max(self.trainer.residual_bytes, self.compute_bytes) if self.trainer.residual_bytes else self.compute_bytes
        )

    @property
    def reduction_bytes(self) -> float:
        """Bytes per element of sums and of the loss: float32 or wider."""
        return max(4.0, self.compute_bytes)

    @property
    def input_bytes(self) -> float:
        """Bytes per element of the input of a matmul that is saved for backward."""
        return 1.0 if self.trainer.saves_quantized_inputs else self.compute_bytes

    def residual_stream(self, width: int) -> float:
        """Bytes of the residual stream of one micro-batch."""
        return self.residual_tokens * width * self.residual_bytes


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one block for one micro-batch."""

    saved: float
    """saved from forward to backward"""
    forward_peak: float
    """in addition to `saved`, at the peak of the forward pass"""
    backward_peak: float
    """in addition to `saved`, at the peak of the backward pass"""
    input_backward_peak: float
    """the same for a backward pass that computes input gradients only, and frees nothing"""
    deferred: float
    """gradients of matmul outputs that wait for the weight gradients of a split backward pass"""
    autocast_weights: float
    """copies of the block's weights that autocast makes, and keeps to the end of forward"""


@singledispatch
def hidden_state_bytes(model: Any, settings: ActivationSettings) -> float:
    """Bytes of the hidden states between two blocks, for one micro-batch."""
    raise NotImplementedError(type(model))


@hidden_state_bytes.register
def _(model: Architecture, settings: ActivationSettings) -> float:
    return settings.residual_stream(model.width)


@singledispatch
def input_bytes(model: Any, settings: ActivationSettings) -> float:
    """Bytes of the tensors of one micro-batch."""
    raise NotImplementedError(type(model))


@input_bytes.register
def _(_model: Architecture, settings: ActivationSettings) -> float:
    return 16 * settings.tokens  # tokens and labels


@singledispatch
def outer_activations(model: Any, settings: ActivationSettings) -> float:
    """Bytes that the modules before the blocks save for one micro-batch, in addition to the inputs of the blocks."""
    raise NotImplementedError(type(model))


@outer_activations.register
def _(_model: Architecture, _settings: ActivationSettings) -> float:
    return 0.0


@singledispatch
def block_activations(model: Any, settings: ActivationSettings, moe: bool) -> BlockActivations:
    """Bytes of one block for one micro-batch."""
    raise NotImplementedError(type(model))


@block_activations.register
@cache
def _(model: Architecture, settings: ActivationSettings, moe: bool) -> BlockActivations:
    attention, ffn = attention_activations(model, settings), ffn_activations(model, settings, moe)
    residual = settings.residual_stream(model.width)
    norms = 2 * norm_activations(model, settings)
    if model.post_norms:  # the inputs of these norms are saved for them alone
        norms += 2 * (norm_activations(model, settings) + residual)
    masks = 2 * settings.residual_tokens * model.width if settings.trainer.dropout_masks else 0
    cast = autocast_weights(model, settings, moe)
    total = 2 * residual + norms + masks + attention.saved + ffn.saved + cast
    # Backward runs the feed-forward first, and frees its activations before it runs attention.
    gradients = residual + max(ffn.backward_peak, attention.backward_peak - ffn.saved, 0)
    input_gradients = residual + max(ffn.backward_peak, attention.backward_peak + ffn.output_gradients)
    matmul_outputs = attention.matmul_outputs + ffn.matmul_outputs
    deferred = attention.output_gradients + ffn.output_gradients + 2 * residual
    if settings.activation_checkpoint == "none":
        return BlockActivations(total, ffn.forward_peak, gradients, input_gradients, deferred, cast)
    if settings.activation_checkpoint == "full":
        saved = residual / settings.segment
        recomputed = settings.segment * total - residual
        return BlockActivations(
            saved, total, recomputed + gradients, recomputed + input_gradients, deferred + total - saved, cast
        )
    alternate = attention.attention_output + (matmul_outputs - attention.attention_output) / 2
    saved_by_policy = {
        "matmuls": residual + matmul_outputs,
        "alternate_matmuls": residual + alternate,
        "all_but_scores": total - attention.scores,
    }
    saved = saved_by_policy[settings.trainer.selective_policy]
    recomputed = total - saved
    return BlockActivations(
        saved, ffn.forward_peak, recomputed + gradients, recomputed + input_gradients, deferred + recomputed, cast
    )


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


def norm_activations(model: Architecture, settings: ActivationSettings) -> float:
    """Bytes that one norm saves in addition to its input."""
    if settings.trainer.fused_kernels:
        return 4 * settings.residual_tokens
    return settings.residual_tokens * (model.width + 1) * settings.residual_bytes


def matmul_inputs(model: Architecture, settings: ActivationSettings, matmuls: int) -> float:
    """Bytes that matmuls with the same input save of it."""
    layout, tokens = settings.layout, settings.tokens
    if layout.tensor > 1:
        copies = 1
        tokens = settings.residual_tokens if settings.trainer.regathers_in_backward else tokens
    else:
        casts = not settings.trainer.fused_kernels and settings.compute_bytes != settings.residual_bytes
        copies = matmuls if casts else 1
    return copies * tokens * model.width * settings.input_bytes


def module_output(model: Architecture, settings: ActivationSettings) -> float:
    """The output of a tensor-parallel module: the partial sum, and with a tensor axis also the reduce-scattered sum."""
    partial = settings.tokens * model.width * settings.compute_bytes
    if settings.layout.tensor == 1:
        return partial
    return partial + settings.residual_tokens * model.width * settings.compute_bytes


def attention_activations(model: Architecture, settings: ActivationSettings) -> ModuleActivations:
    layout, trainer, e = settings.layout, settings.trainer, settings.compute_bytes
    tokens = settings.tokens / layout.tensor
    ring = layout.context > 1 and settings.context_method == "ring"
    kv_ranks = layout.context if settings.context_method == "all-to-all" else 1
    if model.latent_attention is None:
        queries = values = model.heads * model.head_dim
        keys = 2 * max(model.kv_heads, min(kv_ranks * layout.tensor, model.heads)) * model.head_dim
        latent = 0
    else:
        mla = model.latent_attention
        queries, values = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), model.heads * mla.v_head_dim
        keys, latent = queries + values, 2 * (mla.q_lora_rank + mla.kv_lora_rank) + mla.qk_rope_head_dim
    copies_output = (ring and not trainer.fused_kernels) or (settings.on_cpu and model.latent_attention is not None)
    token_layout = values if copies_output else 0
    logsumexp = tokens * model.heads * settings.reduction_bytes if trainer.flash_attention else 0.0
    qkvo = tokens * (queries + keys + values) * e + logsumexp
    scores = 0.0
    if not trainer.flash_attention:
        scores = tokens * settings.sequence / layout.context * model.heads * (2 * e + 1 if trainer.dropout_masks else e)
    inputs = matmul_inputs(model, settings, 3) + head_norm_activations(model, settings)
    quantized = tokens * values if trainer.saves_quantized_inputs else 0.0  # the output of attention, once more
    saved = inputs + qkvo + tokens * token_layout * e + settings.tokens * latent * e + scores + quantized
    output_gradients = tokens * (queries + keys) * e + settings.tokens * model.width * e
    materializes_scores = ring and (settings.on_cpu or settings.has_documents)
    backward_peak = 0.0
    if materializes_scores:
        backward_peak = 4.5 * tokens * settings.sequence / layout.context * model.heads * settings.reduction_bytes
    return ModuleActivations(
        saved,
        qkvo + module_output(model, settings),
        output_gradients,
        backward_peak,
        scores=scores,
        attention_output=tokens * values * e + logsumexp,
    )


def head_norm_activations(model: Architecture, settings: ActivationSettings) -> float:
    """Bytes that the norms of queries and keys save: the input, the normalizer, and unfused the normalized input."""
    if not model.qk_norm:
        return 0.0
    wide, heads = settings.reduction_bytes, model.heads + model.kv_heads
    element = settings.compute_bytes + (0 if settings.trainer.fused_kernels else wide)
    return settings.tokens / settings.layout.tensor * heads * (model.head_dim * element + wide)


def ffn_activations(model: Architecture, settings: ActivationSettings, moe: bool) -> ModuleActivations:
    layout, e = settings.layout, settings.compute_bytes
    saved_per_inner = (3 if settings.trainer.fused_kernels else 4) if model.gated else 2
    if not moe:
        inner = settings.tokens * model.ffn * e / layout.tensor
        up_matmuls = model.ffn_matrices - 1
        saved = matmul_inputs(model, settings, up_matmuls) + saved_per_inner * inner
        if settings.trainer.saves_quantized_inputs:  # the input of the last matmul
            saved -= inner * (1 - settings.input_bytes / e)
        output_gradients = up_matmuls * inner + settings.tokens * model.width * e
        return ModuleActivations(
            saved, up_matmuls * inner + module_output(model, settings), output_gradients, 2 * inner
        )  # fmt: skip
    routed, shared_ffn = settings.residual_tokens * model.experts_active, model.experts_shared * model.expert_ffn
    if not settings.trainer.sequence_parallel and layout.tensor > 1:
        routed = routed / layout.tensor
    copies = 3 if layout.expert > 1 else 2
    inner = routed * model.expert_ffn * e
    experts = routed * (copies * model.width * e + 16 + settings.reduction_bytes) + saved_per_inner * inner
    router = settings.residual_tokens * (
        model.width * settings.residual_bytes + 2 * model.experts * settings.reduction_bytes
    )
    shared = settings.tokens * shared_ffn * e / layout.tensor
    saved, matmul_outputs = experts + router, 2 * inner + routed * model.width * e
    if shared_ffn:
        own_input = layout.tensor > 1 or settings.compute_bytes != settings.residual_bytes
        saved += saved_per_inner * shared + (matmul_inputs(model, settings, 2) if own_input else 0)
        matmul_outputs += 2 * shared + module_output(model, settings)
    hidden = routed * model.width * e
    output_gradients = 2 * inner + 2 * hidden + 2 * shared
    # Backward runs shared experts first, and frees their activations before it runs the routed ones.
    return ModuleActivations(
        saved, matmul_outputs, output_gradients, max(2 * shared, 2 * inner - 3 * hidden), 2 * hidden
    )  # fmt: skip


def autocast_weights(model: Architecture, settings: ActivationSettings, moe: bool) -> float:
    """Bytes of the copies that autocast makes of one block's weights."""
    if not settings.autocast:
        return 0
    layout, e = settings.layout, settings.compute_bytes
    if not moe:
        return (model.attention_parameters + model.ffn_parameters) / layout.tensor * e
    experts = model.experts * model.expert_parameters / layout.expert
    shared = model.experts_shared * model.expert_parameters
    return ((model.attention_parameters + shared) / layout.tensor + experts) * e


@dataclass(frozen=True)
class HeadActivations:
    """Bytes of the final norm, the head and the loss for one micro-batch."""

    saved: float
    """saved from forward to backward, without logits"""
    logits: float
    """logits that are saved from forward to backward"""
    forward_peak: float
    """in addition, while the loss is computed"""
    backward_peak: float
    """in addition, when the backward pass of the loss begins"""
    logit_gradient: float
    """the gradient of the logits, while the gradient of the head's weight is computed"""
    deferred: float
    """gradients that wait for the weight gradients of a split backward pass"""


@singledispatch
def head_activations(model: Any, settings: ActivationSettings) -> HeadActivations:
    """Bytes of the final norm, the head and the loss for one micro-batch."""
    raise NotImplementedError(type(model))


@head_activations.register
@cache
def _(model: Architecture, settings: ActivationSettings) -> HeadActivations:
    residual = settings.residual_stream(model.width)
    saved = residual + norm_activations(model, settings) + matmul_inputs(model, settings, 1)
    if settings.autocast:
        saved += model.vocab * model.width / settings.layout.tensor * settings.compute_bytes
    logits = settings.tokens * model.vocab / settings.layout.tensor
    if settings.trainer.loss_chunk_bytes:
        # Forward computes the gradients of the hidden states, in place of what it would save, and of the weight.
        hidden = settings.tokens * model.width * settings.compute_bytes
        weight = model.vocab * model.width / settings.layout.tensor
        most = settings.trainer.loss_chunk_bytes / (1 if settings.activation_checkpoint == "none" else 2)
        share = min(1.0, LOSS_CHUNK_TOKENS / settings.tokens)
        chunk = min(most, share * logits * settings.compute_bytes)
        saved = residual + norm_activations(model, settings) + hidden
        gradient, scaled = weight * settings.reduction_bytes, weight * settings.compute_bytes
        return HeadActivations(saved, gradient, chunk + hidden, scaled, 0, 2 * residual)
    if settings.trainer.logit_bytes:
        peak = settings.trainer.logit_bytes * logits
        return HeadActivations(saved, 0, peak, peak, settings.compute_bytes * logits, 0)
    vocab_parallel = settings.layout.tensor > 1
    wide, narrow = logits * settings.reduction_bytes, logits * settings.compute_bytes
    upcast = wide if settings.compute_bytes != settings.reduction_bytes else 0
    forward_peak = narrow + upcast + (wide if vocab_parallel else 0)
    return HeadActivations(
        saved, wide, forward_peak, (3 if vocab_parallel else 2) * wide, wide, wide + 2 * residual
    )  # fmt: skip
