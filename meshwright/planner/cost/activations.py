"""What autograd keeps of a decoder's block for one micro-batch, and what passes through memory beside it; torch-free.

Of one rank: T tokens of its pieces of the sequences, t the tensor axis (P = T / t the tokens between matrices, where
the sequence is cut; else T), W width, H query and K key heads of size D, F inner width, V vocabulary, e bytes in the
precision of compute, r bytes of the residual stream. Bytes that stay from forward to backward:

| what | eager | fused |
|---|---|---|
| inputs of both norms | 2 P W r | the same |
| what norms divide by, and their quotients | 2 P (W + 1) r | 8 P |
| inputs of matrices | T W e for q k v, and for gate and up; under autocast a copy for every matrix | one each |
| queries, keys, values, output | T (2 H + 2 K) D e / t, and T H r / t of sums | the same |
| output, laid out by tokens | T H D e / t on CPU and in a ring | none |
| scores, without flash attention | T S H e / t; with dropout 2 e + 1 for e | the same |
| gated feed-forward | 4 T F e / t: both factors, the activated one, the product | 3 T F e / t |
| plain feed-forward | 2 T F e / t | the same |
| masks of dropout | 2 P W | the same |
| weights under autocast | matrices e / t | none |

Experts take P tokens, each of which makes `active` rows, as many on all ranks. A row keeps 3 W e (4 where rows travel)
and 4 F e in the place of the feed-forward, a token the router's input and scores. What Megatron gathers again in
backward is kept in pieces.

| recompute | kept of a block | in backward beside |
|---|---|---|
| none | all of it | gradients: P W r and 2 T F e / t |
| selective, products | the input, every product, attention | what was not kept, and gradients |
| selective, half | those of every other product | |
| selective, attention | all but scores | |
| full | the input of each segment | all of a segment, and gradients |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from meshwright.config.dtypes import COMPUTE_BYTES
from meshwright.planner.workload.architecture import Architecture
from meshwright.planner.workload.trainer_profile import TrainerProfile
from meshwright.topology.layout import Layout

BETWEEN = {**COMPUTE_BYTES, "fp8": 2, "fp4": 2}
"""Bytes of a number between matrices, by precision."""


@dataclass(frozen=True)
class ActivationSettings:
    """What a block's bytes follow from, beside its shape. Hashable, so that equal ones are worked out once."""

    layout: Layout
    stack: TrainerProfile
    micro: int
    sequence: int
    precision: str
    recompute: str
    segment: int
    method: str
    host: bool = False
    """on CPU, whose kernels lay attention's output out by heads"""
    documents: bool = False
    autocast: bool = False
    """weights are cast when they are used, and the copies kept"""

    @property
    def tokens(self) -> float:
        return self.micro * self.sequence / self.layout.context

    @property
    def between(self) -> float:
        """Tokens between matrices."""
        return self.tokens / self.layout.tensor if self.stack.sequence_parallel else self.tokens

    @property
    def number(self) -> float:
        return BETWEEN[self.precision]

    @property
    def stream(self) -> float:
        """Bytes of a number of the residual stream."""
        return max(self.stack.residual_bytes, self.number) if self.stack.residual_bytes else self.number

    @property
    def sums(self) -> float:
        return max(4.0, self.number)


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of one block for one micro-batch."""

    kept: float
    """from forward to backward"""
    forward: float
    """beside that, at the fullest point of its forward pass"""
    backward: float
    """beside that, at the fullest point of its backward pass"""
    halving: float
    """the same of the first part of a backward pass in two, which lets go of nothing"""
    waiting: float
    """gradients of products that the second part of a backward pass in two parts waits for"""
    cast: float
    """copies of its weights that autocast makes, and keeps to the end of forward"""


@cache
def block_activations(model: Architecture, setting: ActivationSettings, experts: bool) -> BlockActivations:
    """Of a layer with a dense feed-forward, or with experts."""
    heads, inner = attention(model, setting), feed_forward(model, setting, experts)
    stream = setting.between * model.width * setting.stream
    norms = 2 * (
        setting.between * (model.width + 1) * setting.stream if not setting.stack.fused_kernels else 4 * setting.between
    )
    masks = 2 * setting.between * model.width if setting.stack.dropout_masks else 0
    cast = weights_cast(model, setting, experts)
    whole = 2 * stream + norms + masks + heads.kept + inner.kept + cast
    # Attention comes after the feed-forward, which has then let go of what it kept.
    gradients = stream + max(inner.passing, heads.passing - inner.kept, 0)
    halving = stream + max(inner.passing, heads.passing + inner.gradients)
    products = heads.products + inner.products
    waiting = heads.gradients + inner.gradients + 2 * stream
    if setting.recompute == "none":
        return BlockActivations(whole, inner.forward, gradients, halving, waiting, cast)
    if setting.recompute == "full":
        kept = stream / setting.segment
        again = setting.segment * whole - stream
        return BlockActivations(kept, whole, again + gradients, again + halving, waiting + whole - kept, cast)
    half = heads.attended + (products - heads.attended) / 2
    less = {"matmuls": stream + products, "alternate_matmuls": stream + half, "all_but_scores": whole - heads.scores}
    kept = less[setting.stack.selective_policy]
    again = whole - kept
    return BlockActivations(kept, inner.forward, again + gradients, again + halving, waiting + again, cast)


@dataclass(frozen=True)
class ModuleActivations:
    kept: float
    products: float
    """of these, or instead, what selective recomputation keeps"""
    gradients: float
    """of products, as large as they are"""
    passing: float = 0
    """at the fullest point of backward, beside what is kept"""
    forward: float = 0
    """the same of forward"""
    scores: float = 0
    attended: float = 0
    """attention's output, with its sums"""


def inputs(model: Architecture, setting: ActivationSettings, matrices: int) -> float:
    """What matrices that read the same keep of it."""
    layout, tokens = setting.layout, setting.tokens
    if layout.tensor > 1:
        copies = 1
        tokens = setting.between if setting.stack.regathers_in_backward else tokens
    else:
        copies = matrices if not setting.stack.fused_kernels and setting.number != setting.stream else 1
    return copies * tokens * model.width * setting.number


def scattered(model: Architecture, setting: ActivationSettings) -> float:
    """A product that leaves the matrices: with a tensor axis also the parts of a sum that it was."""
    whole = setting.tokens * model.width * setting.number
    return whole if setting.layout.tensor == 1 else whole + setting.between * model.width * setting.number


def attention(model: Architecture, setting: ActivationSettings) -> ModuleActivations:
    layout, stack, e = setting.layout, setting.stack, setting.number
    tokens = setting.tokens / layout.tensor
    ranks = layout.context if setting.method == "all-to-all" else 1
    if model.latent_attention is None:
        queries = values = model.heads * model.head_dim
        keys = 2 * max(model.kv_heads, min(ranks * layout.tensor, model.heads)) * model.head_dim
        low = 0
    else:
        mla = model.latent_attention
        queries, values = model.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), model.heads * mla.v_head_dim
        keys, low = queries + values, 2 * (mla.q_lora_rank + mla.kv_lora_rank) + mla.qk_rope_head_dim
    laid_out = (
        values if setting.host or (layout.context > 1 and setting.method == "ring" and not stack.fused_kernels) else 0
    )
    sums = tokens * model.heads * setting.sums if stack.flash_attention else 0.0
    products = tokens * (queries + keys + values) * e + sums
    scores = 0.0
    if not stack.flash_attention:
        scores = tokens * setting.sequence / layout.context * model.heads * (2 * e + 1 if stack.dropout_masks else e)
    masks = 0.0
    if setting.documents and (setting.method == "all-to-all" or layout.context == 1):
        masks = setting.micro * setting.sequence**2 * e
    kept = inputs(model, setting, 3) + products + tokens * laid_out * e + setting.tokens * low * e + scores + masks
    gradients = tokens * (queries + keys) * e + setting.tokens * model.width * e
    plain = layout.context > 1 and setting.method == "ring" and (setting.host or setting.documents)
    passing = 4.5 * tokens * setting.sequence / layout.context * model.heads * setting.sums if plain else 0.0
    attended = tokens * values * e + sums
    return ModuleActivations(
        kept, products + scattered(model, setting), gradients, passing, scores=scores, attended=attended
    )


def feed_forward(model: Architecture, setting: ActivationSettings, experts: bool) -> ModuleActivations:
    e = setting.number
    fold = (3 if setting.stack.fused_kernels else 4) if model.gated else 2
    if not experts:
        inner = setting.tokens * model.ffn * e / setting.layout.tensor
        made = model.ffn_matrices - 1
        kept = inputs(model, setting, made) + fold * inner
        gradients = made * inner + setting.tokens * model.width * e
        return ModuleActivations(kept, made * inner + scattered(model, setting), gradients, 2 * inner)
    rows, shared = setting.between * model.experts_active, model.experts_shared * model.expert_ffn
    if not setting.stack.sequence_parallel and setting.layout.tensor > 1:
        rows = rows / setting.layout.tensor
    travel = 4 if setting.layout.expert > 1 else 3
    inner = rows * model.expert_ffn * e
    routed = rows * (travel * model.width * e + 16 + setting.sums) + fold * inner
    chosen = setting.between * (model.width * setting.stream + 2 * model.experts * setting.sums)
    everywhere = setting.tokens * shared * e / setting.layout.tensor
    kept, products = routed + chosen, 2 * inner + rows * model.width * e
    if shared:
        apart = setting.layout.tensor > 1 or setting.number != setting.stream
        kept += fold * everywhere + (inputs(model, setting, 2) if apart else 0)
        products += 2 * everywhere + scattered(model, setting)
    row = rows * model.width * e
    gradients = 2 * inner + 2 * row + 2 * everywhere
    # What every token visits comes first in backward, and is gone when the bank's turn comes.
    return ModuleActivations(kept, products, gradients, max(2 * everywhere, 2 * inner - 3 * row), 2 * row)


def weights_cast(model: Architecture, setting: ActivationSettings, experts: bool) -> float:
    if not setting.autocast:
        return 0
    layout, e = setting.layout, setting.number
    if not experts:
        return (model.attention_parameters + model.ffn_parameters) / layout.tensor * e
    bank = model.experts * model.expert_parameters / layout.expert
    return ((model.attention_parameters + model.experts_shared * model.expert_parameters) / layout.tensor + bank) * e


@dataclass(frozen=True)
class HeadActivations:
    """Bytes of the last norm, the head and the loss for one micro-batch."""

    kept: float
    """without logits: input of the norm, its quotients, input of the head"""
    logits: float
    """that stay from forward to backward"""
    forward: float
    """beside these, when the loss is computed"""
    backward: float
    """beside these, when its backward pass begins"""
    gradient: float
    """of the logits, alone, when the head's weight gets its own"""
    waiting: float
    """the same as of a block"""


@cache
def head_activations(model: Architecture, setting: ActivationSettings) -> HeadActivations:
    stream = setting.between * model.width * setting.stream
    quotient = (
        4 * setting.between if setting.stack.fused_kernels else setting.between * (model.width + 1) * setting.stream
    )
    kept = stream + quotient + inputs(model, setting, 1)
    if setting.autocast:
        kept += model.vocab * model.width / setting.layout.tensor * setting.number
    numbers = setting.tokens * model.vocab / setting.layout.tensor
    if setting.stack.logit_bytes:
        return HeadActivations(
            kept,
            0,
            setting.stack.logit_bytes * numbers,
            setting.stack.logit_bytes * numbers,
            setting.number * numbers,
            0,
        )
    cut = setting.layout.tensor > 1
    wide, narrow = numbers * setting.sums, numbers * setting.number
    forward = narrow + (wide if setting.number != setting.sums else 0) + (wide if cut else 0)
    return HeadActivations(kept, wide, forward, (3 if cut else 2) * wide, wide, wide + 2 * stream)
