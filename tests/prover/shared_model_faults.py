"""Faults of the model itself, which every layout and every comparison of layouts has alike."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from meshwright.core.kernels import cross_entropy
from meshwright.core.models import init
from meshwright.core.models.layers import decoder, rotary
from meshwright.core.models.layers.attention import CoreAttention
from meshwright.core.models.layers.decoder import Attention, Block, Decoder, LanguageModel
from meshwright.core.models.layers.experts import Experts, Router
from meshwright.core.models.layers.feed_forward import FeedForward
from meshwright.core.models.layers.loss import HeadLoss
from meshwright.core.models.layers.norm import RMSNorm
from meshwright.core.models.layers.rotary import RotaryEmbedding, RotaryTables, apply_rotary
from meshwright.core.parallel.context_parallel import ring_attention, sequence_chunks
from meshwright.core.trainer import build
from tests.prover.seeded_faults import after_init, map_result, wrap
from tests.prover.user_faults import EXPERTS, FORMULA, INCOMPLETE, MODEL, ONE_RANK, user_fault

SETTINGS = (*ONE_RANK, "--seed=5", "--model.rope_theta=100", "--model.norm_eps=1e-4")
FUSED = (*SETTINGS, "--kernels.loss=fused")
DOCUMENTS = (*ONE_RANK, "--model.tie=true", "--model.separator=0")
RING = (*MODEL, "--layout.replicate=1", "--batch.global=2", "--layout.context=3", "--data.sequence=24")
ONE_EXPERT = (*EXPERTS, "--model.experts_active=1")


# Rotary positions.


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def rotation_is_not_orthogonal(patch):
    def wrong(x, rotary):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * rotary.cos - second * rotary.sin, second * rotary.cos - first * rotary.sin), dim=-1)

    patch.setattr(decoder, "apply_rotary", wrong)


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def rotation_pairs_neighboring_dimensions(patch):
    def wrong(x, rotary):
        first, second = x[..., ::2], x[..., 1::2]
        turned = (first * rotary.cos - second * rotary.sin, second * rotary.cos + first * rotary.sin)
        return torch.stack(turned, dim=-1).flatten(-2)

    patch.setattr(decoder, "apply_rotary", wrong)


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def rotary_frequencies_divide_by_half_the_head_size(patch):
    def wrong(positions, head_size, theta, dtype, _scaling):
        exponents = torch.arange(0, head_size, 2, dtype=dtype) / (head_size / 2)
        angles = positions.to(dtype)[..., None] * theta**-exponents
        return angles.cos(), angles.sin()

    patch.setattr(rotary, "rotary_tables", wrong)


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def rotary_base_is_fixed(patch):
    after_init(patch, RotaryEmbedding, lambda self, *_: setattr(self, "theta", 10_000.0))


@user_fault(SETTINGS, "loss of step 0", "rounded")
def rotary_tables_are_rounded_to_bf16(patch):
    map_result(patch, rotary, "rotary_tables", lambda tables, *_: tuple(t.bfloat16().to(t.dtype) for t in tables))


def rotate_as(patch, rotate):
    """Gives the attention core queries, keys and values that `rotate(self, q, k, v, rotary)` returns."""

    def wrong(self, x, rotary):
        batch, sequence, _ = x.shape
        q, k, v = (p(x).view(batch, sequence, -1, self.head_size).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = self.core(*rotate(q, k, v, rotary), rotary.documents)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, -1))

    patch.setattr(Attention, "forward", wrong)


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def keys_have_the_position_of_the_next_token(patch):
    def rotate(q, k, v, rotary):
        later = RotaryTables(rotary.cos.roll(-1, 0), rotary.sin.roll(-1, 0), None)
        return apply_rotary(q, rotary), apply_rotary(k, later), v

    rotate_as(patch, rotate)


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def values_are_rotated_too(patch):
    rotate_as(patch, lambda q, k, v, rotary: [apply_rotary(t, rotary) for t in (q, k, v)])


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def keys_are_rotated_backwards(patch):
    def rotate(q, k, v, rotary):
        return apply_rotary(q, rotary), apply_rotary(k, rotary._replace(sin=-rotary.sin)), v

    rotate_as(patch, rotate)


# Attention.


def attend_by(patch, expert_scores, key_heads=None):
    """Attention with `expert_scores(q, k)` masked scores, and another choice of the key head of every query head."""

    def wrong(self, q, k, v, documents):
        if key_heads is not None:
            index = key_heads(q.shape[1], k.shape[1])
            k, v = k[:, index], v[:, index]
        else:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        return expert_scores(q, k).softmax(dim=-1) @ v

    patch.setattr(CoreAttention, "forward", wrong)


def causal(scores, diagonal=1):
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal)
    return scores.masked_fill(hidden, -math.inf)


def product(q, k):
    return q @ k.mT / math.sqrt(q.shape[-1])


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def causal_mask_shows_the_next_token(patch):
    attend_by(patch, lambda q, k: causal(product(q, k), 2))


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def scores_are_divided_by_the_head_size(patch):
    attend_by(patch, lambda q, k: causal(product(q, k) / math.sqrt(q.shape[-1])))


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def attention_has_a_window_of_eight_tokens(patch):
    def scores(q, k):
        far = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-8)
        return causal(product(q, k)).masked_fill(far, -math.inf)

    attend_by(patch, scores)


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def key_heads_are_tiled_over_query_heads(patch):
    attend_by(patch, lambda q, k: causal(product(q, k)), lambda heads, kv_heads: torch.arange(heads) % kv_heads)


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def scores_are_capped(patch):
    attend_by(patch, lambda q, k: causal(1e-3 * (1e3 * product(q, k)).tanh()))


@user_fault(DOCUMENTS, "loss of step 0", FORMULA)
def separator_belongs_to_the_next_document(patch):
    def wrong(tokens, separator):
        return (tokens == separator).long().cumsum(dim=1)

    patch.setattr(decoder, "document_ids", wrong)


@user_fault(DOCUMENTS, "loss of step 0", FORMULA)
def separator_with_id_zero_is_no_separator(patch):
    wrap(patch, decoder, "document_ids", lambda right, tokens, separator: right(tokens, separator or None))


# Norms, residuals, feed-forward.


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def norm_adds_epsilon_to_the_root(patch):
    def wrong(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight

    patch.setattr(RMSNorm, "forward", wrong)


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def last_norm_has_the_default_epsilon(patch):
    after_init(patch, Decoder, lambda self, *_: setattr(self.norm, "eps", 1e-5))


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def norm_subtracts_the_mean(patch):
    wrap(patch, RMSNorm, "forward", lambda right, self, x: right(self, x - x.mean(-1, keepdim=True)))


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def feed_forward_reads_the_input_of_attention(patch):
    def wrong(self, x, rotary):
        return x + self.attention(self.attention_norm(x), rotary) + self.ffn(self.ffn_norm(x))

    patch.setattr(Block, "forward", wrong)


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def residual_is_the_normalized_input(patch):
    def wrong(self, x, rotary):
        normalized = self.attention_norm(x)
        x = normalized + self.attention(normalized, rotary)
        return x + self.ffn(self.ffn_norm(x))

    patch.setattr(Block, "forward", wrong)


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def gate_and_up_are_swapped(patch):
    patch.setattr(FeedForward, "forward", lambda self, x: self.down(self.gate(x) * F.silu(self.up(x))))


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def feed_forward_uses_gelu(patch):
    patch.setattr(FeedForward, "forward", lambda self, x: self.down(F.gelu(self.gate(x)) * self.up(x)))


# Embedding, head and loss.


@user_fault(DOCUMENTS, "loss of step 0", FORMULA)
def tied_head_is_scaled(patch):
    map_result(patch, HeadLoss, "logits", lambda logits, self, hidden: logits * hidden.shape[-1] ** -0.5)


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def labels_are_shifted_once_more(patch):
    wrap(patch, LanguageModel, "forward", lambda right, self, x, y, *rest: right(self, x, y.roll(-1, 1), *rest))


@user_fault(SETTINGS, "loss of step 0", FORMULA)
def loss_has_label_smoothing(patch):
    def wrong(self, hidden, labels):
        logits = self.logits(hidden).flatten(0, -2)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum", label_smoothing=0.01), labels.numel()

    patch.setattr(HeadLoss, "forward", wrong)


@user_fault(SETTINGS, "loss of step 0", "a small term that does not belong to the loss")
def loss_has_a_z_loss(patch):
    def wrong(total, self, hidden, labels):
        return total[0] + 1e-4 * self.logits(hidden).logsumexp(-1).square().sum(), total[1]

    map_result(patch, HeadLoss, "forward", wrong)


@user_fault(FUSED, "gradient of", INCOMPLETE)
def gradients_of_the_fused_loss_are_not_those_of_the_mean(patch):
    patch.setattr(cross_entropy, "scale", lambda tensor, _factor, dtype: tensor.to(dtype))


@user_fault(FUSED, "gradient of", INCOMPLETE)
def fused_loss_has_the_weight_gradient_of_its_last_chunk(patch):
    patch.setattr(cross_entropy, "default_chunk", lambda *_shapes: 7)
    wrap(patch, cross_entropy, "add_product", lambda right, *matrices, first: right(*matrices, first=True))


@user_fault(SETTINGS, "initial value of", "the initial weights do not follow from the seed")
def projections_into_the_residual_are_not_scaled(patch):
    wrap(patch, init, "init_matrix_shard", lambda right, *args: right(*args[:4], 0.02, args[5]))


@user_fault(SETTINGS, "initial value of", "the initial weights do not follow from the seed")
def initial_weights_ignore_the_seed(patch):
    wrap(patch, build, "init_shard", lambda right, *args: right(*args[:-1], 0))


# Experts.


@user_fault(EXPERTS, "loss of step 0", "experts")
def routing_weights_are_normalized_over_all_experts(patch):
    def wrong(right, self, x):
        scores, chosen, _ = right(self, x)
        return scores, chosen, scores.softmax(dim=-1).gather(1, chosen)

    wrap(patch, Router, "forward", wrong)


@user_fault(EXPERTS, "loss of step 0", "experts")
def routing_weights_are_equal(patch):
    def wrong(right, self, x):
        scores, chosen, weights = right(self, x)
        return scores, chosen, torch.full_like(weights, 1 / self.active) + 0 * weights

    wrap(patch, Router, "forward", wrong)


@user_fault(ONE_EXPERT, "loss of step 0", "experts")
def single_expert_has_the_weight_one(patch):
    def wrong(right, self, x):
        scores, chosen, weights = right(self, x)
        return scores, chosen, weights / weights.detach()

    wrap(patch, Router, "forward", wrong)


@user_fault(EXPERTS, "loss of step 0", "experts")
def shared_experts_are_skipped(patch):
    def wrong(right, self, x):
        shared, self.shared = self.shared, None
        out = right(self, x)
        self.shared = shared
        return out + 0 * shared(x)

    wrap(patch, Experts, "forward", wrong)


@user_fault(EXPERTS, "gradient of", "balance loss")
def balance_loss_counts_the_first_choice_only(patch):
    def wrong(right, self, out, scores, _counts):
        best = scores.argmax(dim=-1).view(out.shape[:2])
        return right(self, out, scores, self.active * (best[..., None] == torch.arange(self.count)).sum(dim=1))

    wrap(patch, Experts, "attach_balance_loss", wrong)


# The ring.


@user_fault(RING, "loss of step 0", "positions, masks or labels of the sequence chunks (context)")
def ring_stops_one_step_early(patch):
    def wrong(right, self, k, v, documents):
        for number, step in enumerate(right(self, k, v, documents)):
            if number + 1 < self.chunks.ranks:
                yield step

    wrap(patch, ring_attention.Ring, "steps", wrong)


@user_fault(RING, "loss of step 0", "positions, masks or labels of the sequence chunks (context)")
def merged_attention_is_averaged(patch):
    def wrong(total, block):
        seen = ~total.lse.isinf()[..., None]
        total.out.copy_(torch.where(seen, (total.out + block.out) / 2, block.out))
        total.lse.copy_(torch.logaddexp(total.lse, block.lse))

    patch.setattr(ring_attention, "merge_result", wrong)


@user_fault(RING, "loss of step 0", "positions, masks or labels of the sequence chunks (context)")
def second_chunk_of_a_rank_has_the_positions_of_the_first(patch):
    def wrong(positions, self, tokens, _device):
        return positions[: tokens // 2].repeat(2)

    map_result(patch, sequence_chunks.ChunkRotaryEmbedding, "positions", wrong)
