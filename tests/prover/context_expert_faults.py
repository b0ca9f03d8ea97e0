"""Seeded faults of context parallelism (ring attention, all-to-all) and of expert parallelism."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist

from meshwright.base.config import IGNORE_INDEX
from meshwright.base.topology.layout import Layout
from meshwright.core.models.layers.expert_weights import ExpertWeights
from meshwright.core.models.layers.experts import Router
from meshwright.core.optim.interface import Optimizer
from meshwright.core.parallel import all_to_all, expert_parallel, parallelize
from meshwright.core.parallel.context_parallel import ring_attention, sequence_chunks
from meshwright.core.parallel.context_parallel.blockwise_attention import AttentionMask
from meshwright.core.parallel.data_parallel import fsdp
from meshwright.core.parallel.data_parallel.ddp import DDPModel
from meshwright.core.parallel.data_parallel.fsdp import FSDPModel
from meshwright.core.parallel.local_shard import local_tensor
from meshwright.core.trainer.evaluate import Evaluation
from meshwright.core.trainer.expert_balancer import ExpertBalancer
from tests.prover.seeded_faults import (
    EVALUATION,
    INCOMPLETE,
    ONE_REPLICA,
    RANKS_MISSING,
    TOKEN_COUNT,
    after_init,
    fault,
    map_result,
    replace_all_reduce,
    skip_all_reduce,
    wrap,
)

RING = (*ONE_REPLICA, "--layout.context=2")
RING_3 = (*ONE_REPLICA, "--layout.context=3")
ULYSSES = (*RING, "--context.method=all-to-all")
DOCUMENTS = ("--model.separator=0",)
MODEL = ("--model.experts=4", "--model.ffn=10")
EXPERTS = ("--layout.replicate=2", "--batch.global=4", "--layout.expert=2", *MODEL)
EXPERT_SHARDS = (*EXPERTS, "--layout.shard=parameters")
EXPERT_REPLICAS = ("--layout.replicate=4", "--batch.global=8", "--layout.expert=2", *MODEL)
EXPERTS_CONTEXT = (*RING, "--layout.expert=2", *MODEL)

CHUNKS = "positions, masks or labels of the sequence chunks (context)"
KEYS_RETURN = "gradients of keys and values do not return from other ranks (context)"
THROUGH_ATTENTION = "gradients do not flow through attention to the tokens of other ranks (context)"
CHUNKS_NOT_SUMMED = "gradients are not summed over the sequence chunks (context)"
TOKENS = "tokens that reach the wrong expert or return in the wrong order (experts)"
TOKENS_RETURN = "gradients of the tokens that experts processed do not return (experts)"
EXPERT_GROUP = "only expert weights are wrong: gradients are averaged or summed over the wrong process group"
BALANCE = "gradient of the balance loss: not of full sequences, or not weighted once over the batch (experts)"
EXPERT_LOADS = "only the router biases are wrong: the expert loads are not summed over all ranks"
ROUTER_BIAS = "router biases that enter the routing weights (experts)"


# Positions, masks and labels of a sequence chunk.


@fault(RING, "loss of step 0", CHUNKS)
def sequence_chunk_positions_start_at_zero(patch):
    patch.setattr(
        sequence_chunks.ChunkRotaryEmbedding,
        "positions",
        lambda self, tokens, device: torch.arange(tokens, device=device),
    )


@fault(ULYSSES, "loss of step 0", CHUNKS)
def ulysses_chunk_positions_start_at_the_previous_rank(patch):
    map_result(
        patch,
        sequence_chunks.ChunkRotaryEmbedding,
        "positions",
        lambda places, self, tokens, _: places - tokens * self.chunks.rank,
    )


@fault(RING_3, "loss of step 0", CHUNKS)
def ring_attention_rotates_the_wrong_way(patch):
    """Sends keys to the previous rank instead of the next."""

    def wrong(self, tensor, tag):
        rank, ranks = self.chunks.rank, self.chunks.ranks
        incoming = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, group=self.group, tag=tag, group_peer=(rank - 1) % ranks)
        receive = dist.P2POp(dist.irecv, incoming, group=self.group, tag=tag, group_peer=(rank + 1) % ranks)
        return ring_attention.PendingTransfer(tensor, incoming, dist.batch_isend_irecv([send, receive]))

    patch.setattr(ring_attention.Ring, "send_to_next", wrong)


@fault(RING, "loss of step 0", CHUNKS)
def causal_mask_is_off_by_a_chunk(patch):
    def wrong(right, rank, source, tokens):
        rows, columns = right(rank, source, tokens)
        return rows, slice(None) if source < rank else columns

    wrap(patch, ring_attention, "visible_slices", wrong)


@fault((*RING, *DOCUMENTS), "loss of step 0", CHUNKS)
def ring_attention_ignores_documents(patch):
    patch.setattr(ring_attention.Ring, "mask", lambda self, source, *_: AttentionMask(source == self.chunks.rank))


@fault((*ULYSSES, *DOCUMENTS), "loss of step 0", CHUNKS)
def documents_are_cut_at_chunk_boundaries(patch):
    def wrong(right, tokens, separator):
        found = right(tokens, separator)
        if found is not None:
            found = found.clone()
            found[:, found.shape[1] // 2 :] += 1
        return found

    wrap(patch, sequence_chunks, "document_ids", wrong)


def drop_last_label(labels):
    """A rank that shifts its local tokens has no label for the last one."""
    labels = labels.clone()
    labels[:, -1] = IGNORE_INDEX
    return labels


@fault(ULYSSES, "loss of step 0", CHUNKS)
def label_at_every_chunk_boundary_is_lost(patch):
    right = sequence_chunks.local_chunk

    def wrong(batch, *options, **named):
        tokens, labels, *rest = right(batch, *options, **named)
        return tokens, drop_last_label(labels), *rest

    patch.setattr(parallelize, "local_chunk", wrong)


# Gradients of a sequence chunk.


@fault(RING, "gradient of decoder.embedding", KEYS_RETURN)
def key_gradients_do_not_return(patch):
    def wrong(right, self, tensor, tag):
        if tag == ring_attention.KEYS:
            return right(self, tensor, tag)
        return ring_attention.PendingTransfer(tensor, torch.zeros_like(tensor), [])

    wrap(patch, ring_attention.Ring, "send_to_next", wrong)


@fault(ULYSSES, "gradient of decoder.embedding", THROUGH_ATTENTION)
def ulysses_all_to_all_has_no_backward(patch):
    patch.setattr(all_to_all.AllToAllFunction, "backward", staticmethod(lambda ctx, grad: (grad, None, None, None)))


@fault(RING, "gradient of", INCOMPLETE, CHUNKS_NOT_SUMMED, "the run failed: ReplicaError")
def gradients_are_not_summed_over_chunks(patch):
    patch.setattr(DDPModel, "micro_step", lambda self, last: self.ddp.no_sync())


@fault(RING, TOKEN_COUNT, "valid tokens are counted 2 times")
def tokens_are_counted_by_every_chunk(patch):
    patch.setattr(Layout, "counts_tokens", lambda self, rank: True)


def every_rank_counts_evaluation_tokens(patch):
    """Makes every rank count its evaluation tokens."""

    def wrong(right, self, parallel_model, precision, world, _counts_tokens, reports_loss):
        return right(self, parallel_model, precision, world, True, reports_loss)

    wrap(patch, Evaluation, "run", wrong)


@fault(RING, "token count of the evaluation", "(factor 2)", EVALUATION)
def evaluation_counts_tokens_on_every_chunk(patch):
    every_rank_counts_evaluation_tokens(patch)


# Dispatch of tokens to experts.


@fault(EXPERTS, "loss of step 0", TOKENS)
def tokens_are_not_sorted_by_local_expert(patch):
    patch.setattr(expert_parallel, "expert_sort_order", lambda patch_norm_counting, rows: torch.arange(rows))


def patch_dispatch(patch, **parts):
    """AllToAllDispatch with another all-to-all (`there`), or another order of the returned tokens (`back`)."""
    there = parts.get("there", expert_parallel.all_to_all)
    put_back = parts.get("back", lambda made, order: made.new_zeros(made.shape).index_copy(0, order, made))

    def wrong(self, bank, rows, patch_norm_counting):
        meant = torch.empty_like(patch_norm_counting)
        dist.all_to_all_single(meant, patch_norm_counting.contiguous(), group=self.group)
        both = torch.stack((patch_norm_counting, meant)).view(2, self.group.size(), -1)
        outgoing, incoming = both.sum(dim=2).tolist()
        here = there(rows, self.group, outgoing, incoming)
        order = expert_parallel.expert_sort_order(both[1], sum(incoming))
        made = bank(here.index_select(0, order), both[1].sum(dim=0))
        return expert_parallel.all_to_all(put_back(made, order), self.group, incoming, outgoing)

    patch.setattr(expert_parallel.AllToAllDispatch, "forward", wrong)


@fault(EXPERTS, "loss of step 0", TOKENS)
def tokens_are_not_returned_in_order(patch):
    patch_dispatch(patch, back=lambda made, order: made)


@fault(EXPERTS, "gradient of decoder.embedding", TOKENS_RETURN)
def expert_all_to_all_has_no_backward(patch):
    patch_dispatch(patch, there=all_to_all.exchange_rows)


@fault(EXPERTS, "loss of step 0", TOKENS)
def token_counts_of_ranks_are_swapped(patch):
    """As many tokens, in another order of the ranks."""
    right = all_to_all.exchange_rows

    def wrong(rows, group, outgoing, incoming):
        came = right(rows, group, outgoing, incoming)
        return torch.cat(came.split(incoming)[::-1])

    patch.setattr(all_to_all, "exchange_rows", wrong)


# Gradients of expert weights.


def patch_expert_gradients(patch, model_class, wrong):
    """Calls `wrong(gradient)` on the gradient of every expert weight after the last micro-batch."""
    right = model_class.micro_step

    @contextmanager
    def micro_step(self, last):
        with right(self, last):
            yield
        experts = [module for module in self.module.modules() if isinstance(module, ExpertWeights)]
        for p in (p for weights in experts for p in weights.parameters()):
            if last and p.grad is not None:
                wrong(local_tensor(p.grad))

    patch.setattr(model_class, "micro_step", micro_step)


@fault(EXPERT_SHARDS, "gradient of decoder.blocks.0.ffn.bank", "(factor 0.5)", EXPERT_GROUP)
def expert_gradients_are_averaged_over_their_group(patch):
    patch_expert_gradients(patch, FSDPModel, lambda gradient: gradient.div_(2))


@fault(EXPERTS, "gradient of decoder.blocks.0.ffn.bank", EXPERT_GROUP)
def expert_gradients_are_summed_over_the_dense_group(patch):
    patch_expert_gradients(patch, FSDPModel, lambda gradient: dist.all_reduce(gradient))


@fault(EXPERT_REPLICAS, "gradient of decoder.blocks.0.ffn.bank", EXPERT_GROUP)
def expert_replicas_are_not_reduced(patch):
    def wrong(right, unit, mesh, **rest):
        return right(unit, mesh=mesh["expert_shard"] if isinstance(unit, ExpertWeights) else mesh, **rest)

    wrap(patch, fsdp, "fully_shard", wrong)


# Load balancing of experts.


@fault((*EXPERTS, "--model.router_bias_rate=1e-9"), "update of decoder.blocks.0.ffn.router.bias", EXPERT_LOADS)
def router_biases_follow_the_load_of_one_rank(patch):
    replace_all_reduce(patch, "expert loads", skip_all_reduce)


@fault(EXPERTS, "loss of step 1", ROUTER_BIAS)
def router_biases_enter_the_routing_weights(patch):
    def wrong(right, self, x):
        scores, chosen, _ = right(self, x)
        return scores, chosen, (scores + self.bias).gather(1, chosen).softmax(dim=-1)

    wrap(patch, Router, "forward", wrong)


@fault(EXPERTS_CONTEXT, "gradient of decoder.embedding", BALANCE)
def balance_loss_is_of_sequence_chunks(patch):
    patch.setattr(expert_parallel.AllReduceCounts, "forward", lambda self, patch_norm_counting: patch_norm_counting)


@fault(EXPERTS, "gradient of decoder.embedding", BALANCE)
def balance_loss_is_weighted_twice(patch):
    after_init(patch, ExpertBalancer, lambda self, *_: setattr(self, "weight", self.weight * 2))


# The gradient norm.


def patch_norm_counting(patch, rule):
    """Decides by `rule(name, counted)` which gradients a rank counts in the norm."""

    def wrong(self, *_):
        self.counts_in_norm = [
            rule(name, counted) for name, counted in zip(self.names, self.counts_in_norm, strict=True)
        ]

    after_init(patch, Optimizer, wrong)


@fault(EXPERTS, "gradient norm of step 0", RANKS_MISSING)
def gradient_norm_counts_the_experts_of_one_rank(patch):
    patch_norm_counting(patch, lambda name, counted: counted and dist.get_rank() == 0)


@fault(EXPERT_REPLICAS, "gradient norm of step 0", "replicated expert weights are counted more than once")
def gradient_norm_counts_every_replica_of_an_expert(patch):
    patch_norm_counting(patch, lambda name, counted: counted or ".bank." in name)
