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
| gate of attention and gated output | 2 T H D e / t | the same |
| output in token layout | T H D e / t with ring attention or capped scores, and on CPU (below) | not with a ring |
| scores, without flash attention | T S H e / t; with dropout 2 e + 1 instead of e | the same |
| gated feed-forward | 4 T F e / t: gate, up, activation and their product | 3 T F e / t; 2 without the product |
| plain feed-forward | 2 T F e / t | the same |
| dropout masks | 2 P W | the same |
| weights under autocast | all matrices, e / t | none |

On CPU, attention of latent, windowed or packed sequences writes its output by heads, and copies it to token layout.
A mixture of experts routes P tokens to `experts_active` experts each; the busiest rank has `expert_imbalance` times the
mean. Instead of the feed-forward, a routed token saves 2 W e (3 W e with expert parallelism) and 4 F e, and every token
saves the router's input and scores.
Megatron keeps what it all-gathers again in backward as local shards.

| activation checkpointing | saved per block | in addition during backward |
|---|---|---|
| none | everything | gradients: P W r and 2 T F e / t |
| selective, matmuls | the input, every matmul output, attention | what was not saved, and gradients |
| selective, alternate matmuls | every other matmul output | the same |
| selective, all but scores | everything except scores | the same |
| selective, all but pointwise | everything except outputs of norms and activation functions | the same |
| full | the input of each segment | everything of a segment, and gradients |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, singledispatch
from typing import Any

from meshwright.base.dtypes import COMPUTE_BYTES
from meshwright.base.models.architecture import Architecture
from meshwright.base.models.block_kinds import BlockKind
from meshwright.base.topology.layout import Layout
from meshwright.planner.cost.terms.module_activations import (
    ModuleActivations,
    attention_activations,
    autocast_weights,
    ffn_activations,
    norm_activations,
    scan_activations,
    with_factors,
)
from meshwright.planner.workload.optimizer_bytes import ALL_TRAINED, TrainedShares
from meshwright.planner.workload.trainer_profile import TrainerProfile

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
    expert_imbalance: float = 1.0
    """load of the busiest expert-parallel rank as a multiple of the mean"""
    trained: TrainedShares = ALL_TRAINED
    """which part of the model is trained: a frozen weight needs neither its input nor a gradient"""

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

    @property
    def cast_share(self) -> float:
        """The share of the weights of blocks that autocast copies: frozen ones are float32, whatever the others are."""
        return 1 - self.trained.block if self.trainer.master_bytes else 1.0

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
    """in addition to `saved`, between the two parts of a split backward pass: gradients of matmul outputs; less than
    nothing if what forward saved for the first part is freed after it"""
    autocast_weights: float
    """copies of the block's weights that autocast makes, and keeps to the end of forward: those of trained weights"""


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
    """Of a hybrid model, the mean over its kinds of blocks of what is saved, and the largest peaks."""
    blocks = [(kind_activations(model, settings, kind), share) for kind, share in model.kinds(moe)]
    if len(blocks) == 1:
        return blocks[0][0]
    return BlockActivations(
        sum(share * block.saved for block, share in blocks),
        max(block.forward_peak for block, _ in blocks),
        max(block.backward_peak for block, _ in blocks),
        max(block.input_backward_peak for block, _ in blocks),
        sum(share * block.deferred for block, share in blocks),
        sum(share * block.autocast_weights for block, share in blocks),
    )


def kind_activations(model: Architecture, settings: ActivationSettings, kind: BlockKind) -> BlockActivations:
    """Bytes of one block of a kind for one micro-batch."""
    moe, trained, no_module = kind.ffn == "moe", settings.trained, ModuleActivations(0.0, 0.0, 0.0)
    attention = attention_activations(model, settings, kind) if kind.has_attention else no_module
    attention = scan_activations(model, settings, kind) if kind.has_scan else attention
    ffn = ffn_activations(model, settings, moe) if kind.ffn != "none" else no_module
    residual = settings.residual_stream(model.width)
    norm = norm_activations(model, settings, trained.norms)
    norms = kind.sublayers * norm
    if model.post_norms:  # the inputs of these norms are saved for them alone
        norms += kind.sublayers * (norm + residual)
    masks = kind.sublayers * settings.residual_tokens * model.width if settings.trainer.dropout_masks else 0
    cast = autocast_weights(model, settings, kind)
    if trained.factors:
        attention = with_factors(attention, settings)
    total = kind.sublayers * residual + norms + masks + attention.saved + ffn.saved + cast
    # Backward runs the feed-forward first, and frees its activations before it runs attention.
    gradients = residual + max(ffn.backward_peak, attention.backward_peak - ffn.saved, 0)
    input_gradients = residual + max(ffn.backward_peak, attention.backward_peak + ffn.output_gradients)
    matmul_outputs = attention.matmul_outputs + ffn.matmul_outputs
    if settings.activation_checkpoint == "none":
        saved, in_forward, recomputed = total - trained.leading * residual, ffn.forward_peak, 0.0
    elif settings.activation_checkpoint == "full":
        saved, in_forward, recomputed = residual / settings.segment, total, settings.segment * total - residual
    else:
        alternate = attention.attention_output + (matmul_outputs - attention.attention_output) / 2
        saved_by_policy = {
            "matmuls": residual + matmul_outputs,
            "alternate_matmuls": residual + alternate,
            "all_but_scores": total - attention.scores,
            "all_but_pointwise": total - attention.pointwise - ffn.pointwise,
        }
        saved, in_forward = saved_by_policy[settings.trainer.selective_policy], ffn.forward_peak
        recomputed = total - saved
    output_gradients = trained.mixer_inputs * attention.output_gradients + trained.ffn_inputs * ffn.output_gradients
    if settings.trainer.defers_matmuls_only:
        kept = attention.matmul_inputs + ffn.matmul_inputs
        deferred = kept + output_gradients * settings.input_bytes / settings.compute_bytes - saved
    else:
        deferred = output_gradients + 2 * trained.norms * residual + total - saved
    # Autocast keeps copies of trained weights to the end of forward, and no copies of frozen ones.
    kept = 0.0 if settings.trainer.master_bytes else trained.block * cast
    reached = trained.reached
    return BlockActivations(
        reached * saved, in_forward, recomputed + gradients, recomputed + input_gradients, reached * deferred, kept
    )
