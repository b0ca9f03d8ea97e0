"""Seeded faults of sequences in pieces and of experts on ranks: each breaks one line, as systems in use have been."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import layout_faults
import torch
import torch.distributed as dist
from layout_faults import INCOMPLETE, SOME_RANKS, TIED, TOO_OFTEN, Fault, after, born, sums, unsummed, wrap

from meshwright.config import IGNORE_INDEX
from meshwright.models.expert_weights import ExpertWeights
from meshwright.models.experts import Router
from meshwright.optim.adamw import AdamW
from meshwright.parallel import all_to_all, expert_parallel, parallelize
from meshwright.parallel.context_parallel import ring_attention, sequence_chunks
from meshwright.parallel.context_parallel.blockwise_attention import AttentionMask
from meshwright.parallel.data_parallel import fsdp
from meshwright.parallel.data_parallel.ddp import DDPModel
from meshwright.parallel.data_parallel.fsdp import FSDPModel
from meshwright.parallel.local_shard import local_tensor
from meshwright.topology.layout import Layout
from meshwright.trainer.evaluate import Evaluation
from meshwright.trainer.expert_balancer import ExpertBalancer

FAULTS: dict[str, Fault] = {}
fault = partial(layout_faults.fault, among=FAULTS)

ONE = "--layout.replicate=1"
RING = (ONE, "--layout.context=2")
RING_OF_THREE = (ONE, "--layout.context=3")
HEADS = (*RING, "--context.method=all-to-all")
MODEL = ("--model.experts=4", "--model.ffn=10")
EXPERTS = ("--layout.replicate=2", "--layout.expert=2", *MODEL)
EXPERT_SHARDS = (*EXPERTS, "--layout.shard=parameters")
EXPERT_COPIES = ("--layout.replicate=4", "--layout.expert=2", *MODEL)
EXPERTS_IN_PIECES = (*RING, "--layout.expert=2", *MODEL)

PIECES = "positions, masks or labels of the pieces (context)"
HOME = "gradients of keys and values do not come home from other ranks (context)"
THROUGH = "gradients do not come back through attention to other ranks' tokens (context)"
NOT_SUMMED = "gradients are not summed over the pieces of sequences (context)"
ROWS = "rows that reach other experts or come back in another order (experts)"
ROWS_BACK = "gradients of the rows that experts took do not come back (experts)"
GROUP = "experts' weights alone are: gradients are divided by, or summed over, the wrong group of ranks"
PULL = "the pull of the balance loss: not of whole sequences, or not weighed once over the batch (experts)"
LOADS = "router biases alone are: loads are not those of all ranks"
WEIGHED = "router biases moved by less than the load of all ranks, or weighing as well as choosing (experts)"
EVALUATION = "training is right, evaluation does not weigh every token once"


# Positions, masks and labels of a piece.


@fault(RING, "loss of step 0", PIECES)
def a_piece_counts_its_positions_from_zero(patch):
    patch.setattr(
        sequence_chunks.ChunkRotaryEmbedding,
        "positions",
        lambda self, tokens, device: torch.arange(tokens, device=device),
    )


@fault(HEADS, "loss of step 0", PIECES)
def a_piece_by_heads_counts_its_positions_from_the_rank_before(patch):
    after(
        patch,
        sequence_chunks.ChunkRotaryEmbedding,
        "positions",
        lambda places, self, tokens, _: places - tokens * self.chunks.rank,
    )


@fault(RING_OF_THREE, "loss of step 0", PIECES)
def the_ring_takes_one_ranks_keys_for_anothers(patch):
    """They go round the other way."""

    def wrong(self, tensor, tag):
        rank, ranks = self.chunks.rank, self.chunks.ranks
        coming = torch.empty_like(tensor)
        send = dist.P2POp(dist.isend, tensor, group=self.group, tag=tag, group_peer=(rank - 1) % ranks)
        receive = dist.P2POp(dist.irecv, coming, group=self.group, tag=tag, group_peer=(rank + 1) % ranks)
        return ring_attention.PendingTransfer(tensor, coming, dist.batch_isend_irecv([send, receive]))

    patch.setattr(ring_attention.Ring, "send_to_next", wrong)


@fault(RING, "loss of step 0", PIECES)
def the_causal_mask_is_off_by_a_chunk(patch):
    def wrong(right, rank, source, tokens):
        rows, columns = right(rank, source, tokens)
        return rows, slice(None) if source < rank else columns

    wrap(patch, ring_attention, "visible_slices", wrong)


@fault(RING, "loss of step 0", PIECES, proofs=(TIED,))
def the_ring_forgets_documents(patch):
    patch.setattr(ring_attention.Ring, "mask", lambda self, source, *_: AttentionMask(source == self.chunks.rank))


@fault(HEADS, "loss of step 0", PIECES, proofs=(TIED,))
def every_piece_counts_its_documents_anew(patch):
    def wrong(right, tokens, separator):
        found = right(tokens.reshape(2 * len(tokens), -1), separator)
        return found if found is None else found.reshape(tokens.shape)

    wrap(patch, sequence_chunks, "document_ids", wrong)


def cut_labels(labels):
    """A rank that shifts its own tokens has no label for the last."""
    labels = labels.clone()
    labels[:, -1] = IGNORE_INDEX
    return labels


@fault(HEADS, "loss of step 0", PIECES)
def a_label_is_lost_at_every_cut(patch):
    right = sequence_chunks.local_chunk

    def wrong(batch, pieces, separator):
        tokens, labels, *rest = right(batch, pieces, separator)
        return tokens, cut_labels(labels), *rest

    patch.setattr(parallelize, "local_chunk", wrong)


# Gradients of a piece.


@fault(RING, "gradient of decoder.embedding", HOME)
def gradients_of_keys_do_not_come_home(patch):
    def wrong(right, self, tensor, tag):
        if tag == ring_attention.KEYS:
            return right(self, tensor, tag)
        return ring_attention.PendingTransfer(tensor, torch.zeros_like(tensor), [])

    wrap(patch, ring_attention.Ring, "send_to_next", wrong)


@fault(HEADS, "gradient of decoder.embedding", THROUGH)
def the_exchange_of_heads_is_not_turned_round_in_backward(patch):
    patch.setattr(all_to_all.AllToAllFunction, "backward", staticmethod(lambda ctx, grad: (grad, None, None, None)))


@fault(RING, "gradient of", INCOMPLETE, NOT_SUMMED)
def gradients_are_not_summed_over_pieces(patch):
    patch.setattr(DDPModel, "micro_step", lambda self, last: self.ddp.no_sync())


@fault(RING, "loss of step 0", "0.5 times the right one: averaged over context (2) once too often")
def tokens_are_counted_by_every_piece(patch):
    patch.setattr(Layout, "counts_tokens", lambda self, rank: True)


def every_rank_counts_evaluation_tokens(patch):
    """Every rank does."""

    def wrong(right, self, spread, precision, world, _counts_tokens, reports_loss):
        return right(self, spread, precision, world, True, reports_loss)

    wrap(patch, Evaluation, "run", wrong)


@fault(RING, "evaluation loss", "0.5 times the right one", EVALUATION)
def evaluation_counts_tokens_on_every_piece(patch):
    every_rank_counts_evaluation_tokens(patch)


# Rows on their way to experts.


@fault(EXPERTS, "loss of step 0", ROWS)
def rows_are_not_sorted_by_local_expert(patch):
    patch.setattr(expert_parallel, "expert_sort_order", lambda counts, rows: torch.arange(rows))


def travels(patch, **parts):
    """AllToAll with another part: the exchange on the way there (`there`), or the order on the way back (`back`)."""
    there = parts.get("there", expert_parallel.all_to_all)
    put_back = parts.get("back", lambda made, order: made.new_zeros(made.shape).index_copy(0, order, made))

    def wrong(self, bank, rows, counts):
        meant = torch.empty_like(counts)
        dist.all_to_all_single(meant, counts.contiguous(), group=self.group)
        both = torch.stack((counts, meant)).view(2, self.group.size(), -1)
        going, coming = both.sum(dim=2).tolist()
        here = there(rows, self.group, going, coming)
        order = expert_parallel.expert_sort_order(both[1], sum(coming))
        made = bank(here.index_select(0, order), both[1].sum(dim=0))
        return expert_parallel.all_to_all(put_back(made, order), self.group, coming, going)

    patch.setattr(expert_parallel.AllToAllDispatch, "forward", wrong)


@fault(EXPERTS, "loss of step 0", ROWS)
def rows_are_not_put_back_in_order(patch):
    travels(patch, back=lambda made, order: made)


@fault(EXPERTS, "gradient of decoder.embedding", ROWS_BACK)
def an_exchange_of_rows_has_no_backward(patch):
    travels(patch, there=all_to_all.exchange_rows)


@fault(EXPERTS, "loss of step 0", ROWS)
def counts_of_the_ranks_are_taken_for_each_others(patch):
    """As many rows, from ranks in another order."""
    right = all_to_all.exchange_rows

    def wrong(rows, group, going, coming):
        came = right(rows, group, going, coming)
        return torch.cat(came.split(coming)[::-1])

    patch.setattr(all_to_all, "exchange_rows", wrong)


# Experts' gradients.


def bank_gradients(patch, spread, wrong):
    """`wrong(gradient)` of every expert's weights after the last micro-step."""
    right = spread.micro_step

    @contextmanager
    def micro_step(self, last):
        with right(self, last):
            yield
        for p in (p for bank in expert_parallel.find_expert_weights(self.module) for p in bank.parameters()):
            if last and p.grad is not None:
                wrong(local_tensor(p.grad))

    patch.setattr(spread, "micro_step", micro_step)


@fault(EXPERT_SHARDS, "gradient of decoder.blocks.0.ffn.bank", "0.5 times the right one", GROUP)
def experts_are_averaged_over_their_group(patch):
    bank_gradients(patch, FSDPModel, lambda gradient: gradient.div_(2))


@fault(EXPERTS, "gradient of decoder.blocks.0.ffn.bank", GROUP)
def different_experts_are_summed_over_the_dense_group(patch):
    bank_gradients(patch, FSDPModel, lambda gradient: dist.all_reduce(gradient))


@fault(EXPERT_COPIES, "gradient of decoder.blocks.0.ffn.bank", GROUP)
def copies_of_experts_do_not_meet(patch):
    def wrong(right, unit, mesh, **rest):
        return right(unit, mesh=mesh["expert_shard"] if isinstance(unit, ExpertWeights) else mesh, **rest)

    wrap(patch, fsdp, "fully_shard", wrong)


# What keeps experts evenly loaded.


@fault((*EXPERTS, "--model.router_bias_rate=1e-9"), "way of decoder.blocks.0.ffn.router.bias", LOADS)
def router_biases_move_by_the_load_of_one_rank(patch):
    sums(patch, "expert loads", unsummed)


@fault(EXPERTS, "loss of step 1", WEIGHED)
def router_biases_weigh_as_well_as_choose(patch):
    def wrong(right, self, x):
        scores, chosen, _ = right(self, x)
        return scores, chosen, (scores + self.bias).gather(1, chosen).softmax(dim=-1)

    wrap(patch, Router, "forward", wrong)


@fault(EXPERTS_IN_PIECES, "gradient of decoder.embedding", PULL)
def the_balance_loss_is_of_pieces(patch):
    patch.setattr(expert_parallel.AllReduceCounts, "forward", lambda self, counts: counts)


@fault(EXPERTS, "gradient of decoder.embedding", PULL)
def the_balance_loss_counts_a_rank_as_the_batch(patch):
    born(patch, ExpertBalancer, lambda self, *_: setattr(self, "weight", self.weight * 2))


# The norm.


def counts(patch, rule):
    """`rule(name, counted)` in place of which gradients a rank counts."""

    def wrong(self, *_):
        self.counts_in_norm = [rule(name, counts) for name, counts in zip(self.names, self.counts_in_norm, strict=True)]

    born(patch, AdamW, wrong)


@fault(EXPERTS, "gradient norm of step 0", SOME_RANKS)
def the_norm_counts_the_experts_of_one_rank(patch):
    counts(patch, lambda name, counted: counted and dist.get_rank() == 0)


@fault(EXPERT_COPIES, "gradient norm of step 0", TOO_OFTEN)
def the_norm_counts_every_copy_of_an_expert(patch):
    counts(patch, lambda name, counted: counted or ".bank." in name)
