"""Every seeded fault of a layout is caught, and named by what is off, by what factor and from what cause.

Those of copies and shards come from layout_faults.py; here are those of the tensor axis, of inputs and of evaluation.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from layout_faults import (
    BELOW,
    COPIES,
    FAULTS,
    INCOMPLETE,
    PARAMETERS,
    SOME_RANKS,
    TIED,
    TOO_OFTEN,
    TWO_USES,
    after,
    all_count,
    born,
    both_ends_begin_alike,
    broken_without,
    catch,
    fault,
    layouts_of,
    sums,
    unsummed,
    wrap,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import rms_norm
from torch.utils.checkpoint import checkpoint

from meshwright.models.decoder import RMSNorm
from meshwright.parallel import activation_checkpoint, parallel_model, parallelize
from meshwright.parallel.materialize import Materializer
from meshwright.parallel.tensor_parallel import VocabParallelEmbedding, VocabParallelHead
from meshwright.topology.layout import Layout
from meshwright.trainer import loop
from meshwright.trainer.evaluate import Evaluation
from meshwright.trainer.step import Step

CUT = ("--layout.replicate=1", "--layout.tensor=2")
SHARDS_OF_CUTS = (*PARAMETERS, "--layout.tensor=2")
INPUT = "wrong samples, rows, positions or masks"
NORMS = "norm weights are not summed over the pieces of the sequence (tensor)"
FIRST_NORM = "gradient of decoder.blocks.0.attention_norm.weight"
EVALUATION = "training is right, evaluation does not weigh every token once"


# Which samples, rows and inputs.


@fault(COPIES, "loss of step 0", INPUT)
def all_ranks_read_the_same_samples(patch):
    patch.setattr(Layout, "data_coordinate", lambda self, rank: 0)


@fault(CUT, "loss of step 0", INPUT)
def tensor_ranks_read_different_samples(patch):
    patch.setattr(Layout, "data_coordinate", lambda self, rank: rank)


@fault(CUT, "loss of step 0", INPUT)
def every_part_of_a_matrix_begins_with_its_first_row(patch):
    def wrong(right, local, name, shape, offset, *rest):
        right(local, name, shape, [0] * len(offset), *rest)

    wrap(patch, loop, "init_shard", wrong)


@fault(
    (*PARAMETERS, "--activation_checkpoint.mode=full"),
    "gradient of decoder.embedding",
    "right down to decoder.norm.weight",
    BELOW,
)
def recomputation_sees_other_inputs(patch):
    def wrong(block, _mode):
        right = block.forward

        def forward(x, where):
            again = torch._C._current_graph_task_id() != -1  # inside backward
            return right(x.flip(0) if again else x, where)

        block.forward = partial(checkpoint, forward, use_reentrant=False)

    patch.setattr(activation_checkpoint, "checkpoint_block", wrong)


def look_up(patch, tokens_of):
    right = VocabParallelEmbedding.look_up

    def wrong(module, mesh, tokens):
        return right(module, mesh, tokens_of(tokens, mesh.get_local_rank()))

    patch.setattr(VocabParallelEmbedding, "lookup", staticmethod(wrong))


@fault(CUT, "loss of step 0", INPUT)
def a_vocabulary_offset_is_off_by_one(patch):
    look_up(patch, lambda tokens, rank: tokens - rank)


@fault(CUT, "loss of step 0", INPUT)
def pieces_of_the_sequence_are_swapped(patch):
    look_up(patch, lambda tokens, rank: tokens.roll(tokens.shape[1] // 2, dims=1))


def head_takes(patch, wrong):
    """`wrong(mesh, hidden, labels)` in place of what the head is given."""
    right = VocabParallelHead.gather
    patch.setattr(
        VocabParallelHead,
        "gather",
        staticmethod(lambda mesh, module, inputs: wrong(mesh, *right(mesh, module, inputs))),
    )


@fault(CUT, "loss of step 0", INPUT)
def one_rank_sees_shifted_labels(patch):
    head_takes(patch, lambda mesh, hidden, labels: (hidden, labels.roll(mesh.get_local_rank(), dims=1)))


# Sums over the tensor axis.


def counts_tokens_in(patch, name):
    """Every rank counts its tokens in this method."""

    def wrong(right, self, *args):
        previous, self.context.counts_tokens = self.context.counts_tokens, True
        result = right(self, *args)
        self.context.counts_tokens = previous
        return result

    wrap(patch, Step, name, wrong)


@fault(CUT, "loss of step 0", "0.5 times the right one: averaged over tensor (2) once too often")
def tokens_counted_by_every_tensor_rank(patch):
    counts_tokens_in(patch, "_control_vector")


@fault(CUT, "loss of step 0", "2 times the right one: the loss alone is: summed over tensor (2) once too often")
def loss_reported_by_every_tensor_rank(patch):
    born(patch, Step, lambda self, *_: setattr(self.context, "reports_loss", True))


@fault(CUT, "gradient norm of step 0", SOME_RANKS)
def norm_of_this_ranks_parts(patch):
    sums(patch, "gradient norm", unsummed)


@fault(CUT, "gradient norm of step 0", TOO_OFTEN)
def norm_counts_what_every_tensor_rank_holds(patch):  # TransformerEngine PR#715
    all_count(patch)


@fault(CUT, FIRST_NORM, NORMS)
def norm_weights_are_not_summed(patch):
    patch.setattr(parallel_model, "reduce_partial_gradients", lambda *_: None)


def norms_forget_the_pieces(patch):
    """A replicated weight meets a piece of the sequence as a plain tensor: its gradient passes for the whole."""

    def wrong(right, self, x):
        if not isinstance(self.weight, DTensor):
            return right(self, x)
        scaled = rms_norm(x.to_local(), self.weight.shape, eps=self.eps) * self.weight.to_local()
        return DTensor.from_local(scaled, x.device_mesh, x.placements, run_check=False)

    wrap(patch, RMSNorm, "forward", wrong)


@fault(CUT, FIRST_NORM, NORMS)
def norm_weights_pass_for_whole(patch):
    norms_forget_the_pieces(patch)


@fault(SHARDS_OF_CUTS, FIRST_NORM, NORMS)
def norm_weights_pass_for_whole_beside_shards(patch):
    norms_forget_the_pieces(patch)


@fault(CUT, "gradient of decoder.embedding.weight", "right down to head.weight", BELOW)
def parts_of_the_heads_backward_are_not_summed(patch):  # torchtitan PR#1373
    def wrong(mesh, hidden, labels):
        if hidden.requires_grad:
            hidden.register_hook(lambda g: DTensor.from_local(g.to_local(), mesh, [Replicate()], run_check=False))
        return hidden, labels

    head_takes(patch, wrong)


@fault(CUT, "gradient of decoder.blocks.0.attention.out.weight", INCOMPLETE)
def gradients_cut_by_rows_are_summed_over_tensor(patch):
    def wrong(right, parameters, mesh):
        every = list(parameters)
        right(every, mesh)
        for p in every:
            if p.grad is not None and p.placements == (Shard(1),):
                dist.all_reduce(p.grad.to_local(), group=mesh.get_group())

    wrap(patch, parallel_model, "reduce_partial_gradients", wrong)


@fault(CUT, "gradient of decoder.embedding.weight", TWO_USES, proofs=(TIED,))
def a_tied_weight_is_torn_by_the_cut(patch):
    def cut(model, of, mesh):
        parallelize_module(model, mesh, dict(of.tp_plan()), src_data_rank=None)

    patch.setattr(parallelize, "apply_tensor_parallel", cut)
    after(patch, Materializer, "initialize", both_ends_begin_alike)


# Evaluation.


@fault(COPIES, "evaluation loss", EVALUATION)
def evaluation_counts_the_filler(patch):
    def fill(self, *_):
        self.cuts += [self.filler] * (self.passes - len(self.cuts))

    born(patch, Evaluation, fill)


@fault(COPIES, "evaluation loss", EVALUATION)
def evaluation_averages_the_means_of_ranks(patch):
    sums(patch, "evaluation sum", lambda world, right, pair: right(pair / pair[1]))


@fault(COPIES, "evaluation loss", EVALUATION)
def evaluation_drops_what_is_no_whole_micro_batch(patch):
    def drop(self, *_):
        self.cuts = [cut for cut in self.cuts if len(cut) == 2]

    born(patch, Evaluation, drop)


def test_there_are_50_faults():
    assert len(FAULTS) == 50


@pytest.mark.parametrize("layout", layouts_of(FAULTS), ids=" ".join)
def test_without_a_fault_a_layout_keeps_its_promises(layout, monkeypatch):
    assert broken_without(FAULTS, layout, monkeypatch) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_caught_and_named(name, monkeypatch):
    catch(FAULTS[name], monkeypatch)
