"""Faults that exist only from a number of blocks, micro-batches, heads, experts, rows, samples or steps on."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.core.models.layers.attention import CoreAttention
from meshwright.core.models.layers.block_stack import BlockStack
from meshwright.core.models.layers.experts import Experts, Router
from meshwright.core.models.layers.loss import HeadLoss
from meshwright.core.models.layers.rotary import RotaryEmbedding
from meshwright.core.optim.interface import Optimizer
from meshwright.core.parallel.activation_memory.activation_checkpoint import CheckpointedBlockStack
from meshwright.core.parallel.data_parallel import ddp
from meshwright.core.parallel.data_parallel.ddp import DDPModel
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.trainer.evaluate import Evaluation
from meshwright.core.trainer.step import Step
from tests.prover.seeded_faults import after_init, map_result, wrap
from tests.prover.traced_cases import LONG_SEQUENCE, VARIATION
from tests.prover.user_faults import (
    EVALUATION,
    FORMULA,
    INCOMPLETE,
    MODEL,
    ONE_RANK,
    REPLICATE,
    SHARD_PARAMETERS,
    UPDATE,
    user_fault,
)

LAST_STEPS = "last steps"
TWELVE_BLOCKS = (*ONE_RANK, "--model.layers=12", "--batch.global=2", "--model.ffn=6", "--model.vocab=10", "--steps=2")
SEGMENTS = (
    *TWELVE_BLOCKS,
    "--model.layers=5",
    "--activation_checkpoint.mode=full",
    "--activation_checkpoint.segment=2",
)
SIX_MICRO_BATCHES = (*ONE_RANK, "--batch.micro=1", "--batch.global=6")
REPLICATED_MICRO_BATCHES = (*REPLICATE, "--batch.micro=1", "--batch.global=12")
FOUR_QUERIES_PER_KEY = (*ONE_RANK, "--model.heads=8", "--model.kv_heads=2", "--model.width=32")
EIGHT_KEY_HEADS = (*ONE_RANK, "--model.heads=8", "--model.kv_heads=8", "--model.width=32")
LONG = (*ONE_RANK, "--data.sequence=128")
EIGHT_EXPERTS = (*ONE_RANK, "--model.experts=8", "--model.ffn=8")
UNEVEN_PIPELINE = (*MODEL, "--layout.replicate=1", "--layout.pipeline=2", "--model.layers=5", "--batch.global=4")
MANY_SAMPLES = (
    *(*ONE_RANK, "--batch.micro=4", "--batch.global=8", "--eval.samples=40", "--eval.holdout=0.2"),
    *("--steps=2000", "--optimizer.clip=0.1", "--optimizer.eps=1e-4", "--model.vocab=600"),
)


# Blocks.


@user_fault(TWELVE_BLOCKS, "loss of step 0")
def blocks_run_in_alphabetical_order(patch):
    def wrong(right, self, blocks, x, rotary):
        ordered = list(blocks)
        return right(self, [ordered[int(n)] for n in sorted(map(str, range(len(ordered))))], x, rotary)

    wrap(patch, BlockStack, "forward", wrong)


@user_fault(TWELVE_BLOCKS, "update of decoder.blocks.10", UPDATE + "the parameter is not updated")
def blocks_with_two_digits_are_not_updated(patch):
    def wrong(right, self, *rest):
        kept = [(p, p.detach().clone()) for n, p in zip(self.names, self.parameters, strict=True) if ".blocks.1" in n]
        right(self, *rest)
        with torch.no_grad():
            for (p, value), name in zip(kept, [n for n in self.names if ".blocks.1" in n], strict=True):
                if name.split(".")[2] != "1":
                    p.copy_(value)

    wrap(patch, Optimizer, "update", wrong)


@user_fault(TWELVE_BLOCKS, "gradient of")
def gradients_stop_nine_blocks_below_the_head(patch):
    def wrong(self, blocks, x, rotary):
        ordered = list(blocks)
        for index, block in enumerate(ordered):
            x = block(x.detach() if index == len(ordered) - 9 else x, rotary)
        return x

    patch.setattr(BlockStack, "forward", wrong)


@user_fault(SEGMENTS, "loss of step 0")
def last_shorter_segment_is_skipped(patch):
    def wrong(right, self, blocks, x, rotary):
        ordered = list(blocks)
        return right(self, ordered[: len(ordered) // self.size * self.size], x, rotary)

    wrap(patch, CheckpointedBlockStack, "forward", wrong)


@user_fault(SEGMENTS, "gradient of", "activation checkpointing")
def third_segment_is_not_differentiated(patch):
    def wrong(self, blocks, x, rotary):
        ordered = list(blocks)
        for index, block in enumerate(ordered):
            with torch.no_grad() if index == 2 * self.size and torch.is_grad_enabled() else nullcontext():
                y = block(x, rotary)
            x = y if y.requires_grad or not x.requires_grad else x + (y - x).detach()
        return x

    patch.setattr(CheckpointedBlockStack, "forward", wrong)


@user_fault(UNEVEN_PIPELINE, "loss of step 0")
def stage_with_fewer_blocks_runs_its_first_block_twice(patch):
    def wrong(right, self, blocks, x, rotary):
        ordered = list(blocks)
        return right(self, ordered if len(ordered) > 2 else [ordered[0], *ordered], x, rotary)

    wrap(patch, BlockStack, "forward", wrong)


# Micro-batches, rows and buckets.


@user_fault(REPLICATED_MICRO_BATCHES, "gradient of", INCOMPLETE)
def every_fourth_micro_batch_synchronizes_gradients(patch):
    calls = [0]

    def wrong(self, last):
        calls[0] = 0 if last else calls[0] + 1
        return nullcontext() if last or calls[0] == 4 else self.ddp.no_sync()

    patch.setattr(DDPModel, "micro_step", wrong)


@user_fault(SIX_MICRO_BATCHES, "gradient of", INCOMPLETE, "the micro-batches count unequally")
def fifth_micro_batch_has_no_backward(patch):
    def wrong(right, self, micro_batches, hooks):
        scale, calls = hooks.scale_loss, [0]

        def scale_loss(losses):
            calls[0] += 1
            return scale(losses) * (calls[0] != 5)

        hooks.scale_loss = scale_loss
        return right(self, micro_batches, hooks)

    wrap(patch, ParallelModel, "forward_backward", wrong)


@user_fault(SIX_MICRO_BATCHES, "loss of step 0", "tokens have unequal weights", "5 of rank 0 0 times")
def four_input_buffers_are_reused(patch):
    """The inputs of the fifth and sixth micro-batch are those of the first and second."""

    def wrong(right, self, micro_batches, hooks):
        return right(self, [micro_batches[index % 4] for index in range(len(micro_batches))], hooks)

    wrap(patch, ParallelModel, "forward_backward", wrong)


@user_fault(MANY_SAMPLES, "loss of step", runs=(LAST_STEPS,))
def third_row_of_a_micro_batch_sees_the_first(patch):
    def wrong(right, self, q, k, v, documents):
        out = right(self, q, k, v, documents)
        return out if len(out) < 3 else torch.cat((out[:2], out[2:] + 0.1 * out[:1]))

    wrap(patch, CoreAttention, "forward", wrong)


@user_fault(REPLICATE, "gradient of", "a bucket")
def third_bucket_is_averaged(patch):
    right = ddp.reduce_bucket

    def wrong(state, bucket):
        done = right(state, bucket)
        return done.then(lambda d: d.value().div_(2)) if bucket.index() == 2 else done

    patch.setattr(ddp, "reduce_bucket", wrong)


@user_fault((*SHARD_PARAMETERS, "--model.vocab=27"), "gradient norm of step 0")
def norm_drops_shards_of_unequal_size(patch):
    def wrong(self, *_):
        self.counts_in_norm = [
            counted and (shard.local.shape[0] * 2 == shard.shape[0] or shard.offset[0] == 0)
            for counted, shard in zip(self.counts_in_norm, self.shards, strict=True)
        ]

    after_init(patch, Optimizer, wrong)


# Heads, sequence, experts, vocabulary.


def use_key_heads(patch, key_head):
    right = CoreAttention.forward

    def wrong(self, q, k, v, documents):
        heads = torch.tensor([key_head(h, q.shape[1], k.shape[1]) for h in range(q.shape[1])])
        return right(self, q, k[:, heads], v[:, heads], documents)

    patch.setattr(CoreAttention, "forward", wrong)


@user_fault(FOUR_QUERIES_PER_KEY, "loss of step 0", FORMULA)
def at_most_two_query_heads_share_a_key_head(patch):
    use_key_heads(patch, lambda head, heads, kv_heads: head // min(2, heads // kv_heads) % kv_heads)


@user_fault(EIGHT_KEY_HEADS, "loss of step 0", runs=(VARIATION,))
def heads_from_the_fifth_on_use_the_first_keys(patch):
    use_key_heads(patch, lambda head, heads, kv_heads: head // (heads // kv_heads) % 4)


@user_fault(LONG, "loss of step 0", runs=(LONG_SEQUENCE,))
def positions_wrap_after_64_tokens(patch):
    map_result(patch, RotaryEmbedding, "positions", lambda positions, *_: positions % 64)


@user_fault(LONG, "loss of step 0", runs=(LONG_SEQUENCE,))
def attention_has_a_window_of_100_tokens(patch):
    def wrong(self, q, k, v, documents):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril().triu(-99)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    patch.setattr(CoreAttention, "forward", wrong)


@user_fault(EIGHT_EXPERTS, "loss of step 297", "experts", runs=(LAST_STEPS,))
def router_ranks_the_first_five_experts_only(patch):
    def wrong(right, self, x):
        scores, chosen, _ = right(self, x)
        chosen = (
            (scores + self.bias)[:, :5]
            .sort(dim=-1, descending=True, stable=True)
            .indices[:, : self.active]
            .contiguous()
        )
        return scores, chosen, scores.gather(1, chosen).softmax(dim=-1)

    wrap(patch, Router, "forward", wrong)


@user_fault(EIGHT_EXPERTS, "update of", "router.bias", runs=(LAST_STEPS,))
def loads_of_experts_from_the_seventh_on_are_lost(patch):
    map_result(patch, Experts, "take_load", lambda pair, *_: (pair[0] * (torch.arange(len(pair[0])) < 6), pair[1]))


@user_fault(MANY_SAMPLES, "loss of step 1997", runs=(LAST_STEPS,))
def token_ids_are_bytes(patch):
    wrap(patch, nn.Embedding, "forward", lambda right, self, tokens: right(self, tokens % 256))


@user_fault(MANY_SAMPLES, "loss of step 1997", runs=(LAST_STEPS,))
def logits_beyond_512_are_dropped(patch):
    def wrong(logits, *_):
        return logits.masked_fill(torch.arange(logits.shape[-1]) >= 512, -1e4)

    map_result(patch, HeadLoss, "logits", wrong)


# Evaluation and late steps.


@user_fault(MANY_SAMPLES, "evaluation after step", EVALUATION, runs=(LAST_STEPS,))
def evaluation_stops_after_sixteen_samples(patch):
    def wrong(self, *_):
        self.micro_batches = self.micro_batches[:8]

    after_init(patch, Evaluation, wrong)


@user_fault(MANY_SAMPLES, "update of", UPDATE + "the gradients are not clipped", runs=(LAST_STEPS,))
def late_steps_are_not_clipped(patch):
    def wrong(right, self, step, *rest):
        self.optimizer.clip = 0.0 if step > 1000 else self.optimizer.clip
        return right(self, step, *rest)

    wrap(patch, Step, "run", wrong)
