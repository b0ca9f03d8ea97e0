"""Seeded faults of tensor parallelism, of the inputs of ranks, and of evaluation."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import rms_norm
from torch.utils.checkpoint import checkpoint

from meshwright.base.topology.layout import Layout
from meshwright.core.models.layers.norm import RMSNorm
from meshwright.core.parallel import parallel_model, parallelize
from meshwright.core.parallel.activation_memory import activation_checkpoint
from meshwright.core.parallel.materialize import Materializer
from meshwright.core.parallel.tensor_parallel import VocabParallelEmbedding, VocabParallelHead
from meshwright.core.trainer import build
from meshwright.core.trainer.evaluate import Evaluation
from meshwright.core.trainer.step import Step
from tests.prover.data_parallel_faults import count_every_shard
from tests.prover.seeded_faults import (
    COUNTED_TWICE,
    EVALUATION,
    INCOMPLETE,
    ONE_REPLICA,
    RANKS_MISSING,
    REPLICATE,
    SHARD_PARAMETERS,
    TIED,
    TIED_WEIGHT,
    TOKEN_COUNT,
    WRONG_BELOW,
    after_init,
    fault,
    initialize_both_ends_alike,
    map_result,
    replace_all_reduce,
    skip_all_reduce,
    wrap,
)
from tests.prover.traced_cases import VARIATION

TENSOR = (*ONE_REPLICA, "--layout.tensor=2")
FSDP_TENSOR = (*SHARD_PARAMETERS, "--layout.tensor=2")
FORWARD = "forward and backward are wrong: rows, positions, masks, documents or labels"
NORM_WEIGHTS = "gradients of norm weights are not summed over the sequence chunks (tensor)"
FIRST_NORM = "gradient of decoder.blocks.0.attention_norm.weight"


# Samples, rows and inputs.


@fault(REPLICATE, "tokens of step 0", "sample")
def data_parallel_ranks_read_the_same_samples(patch):
    patch.setattr(Layout, "data_coordinate", lambda self, rank: 0)


@fault(TENSOR, "rank 1 step 0: reads other samples than the ranks of its slice")
def tensor_ranks_read_different_samples(patch):
    patch.setattr(Layout, "data_coordinate", lambda self, rank: rank)


@fault(TENSOR, "initial value of")
def every_shard_is_initialized_from_row_zero(patch):
    def wrong(right, local, name, shape, offset, *rest):
        right(local, name, shape, [0] * len(offset), *rest)

    wrap(patch, build, "init_shard", wrong)


@fault(
    (*SHARD_PARAMETERS, "--activation_checkpoint.mode=full"),
    "gradient of decoder.embedding",
    "correct down to decoder.norm.weight",
    WRONG_BELOW,
)
def activation_checkpointing_recomputes_with_other_inputs(patch):
    def wrong(block, _mode):
        right = block.forward

        def forward(x, where):
            again = torch._C._current_graph_task_id() != -1  # inside backward
            return right(x.flip(0) if again else x, where)

        block.forward = partial(checkpoint, forward, use_reentrant=False)

    patch.setattr(activation_checkpoint, "checkpoint_block", wrong)


def patch_lookup(patch, count_tokens):
    right = VocabParallelEmbedding.lookup

    def wrong(module, mesh, tokens):
        return right(module, mesh, count_tokens(tokens, mesh.get_local_rank()))

    patch.setattr(VocabParallelEmbedding, "lookup", staticmethod(wrong))


@fault(TENSOR, "loss of step 0", FORWARD)
def vocabulary_offset_is_off_by_one(patch):
    patch_lookup(patch, lambda tokens, rank: tokens - rank)


@fault(TENSOR, "loss of step 0", FORWARD)
def sequence_chunks_are_swapped(patch):
    patch_lookup(patch, lambda tokens, rank: tokens.roll(tokens.shape[1] // 2, dims=1))


def patch_head_inputs(patch, wrong):
    """Gives the head `wrong(mesh, hidden, labels)`."""
    right = VocabParallelHead.gather
    patch.setattr(
        VocabParallelHead,
        "gather",
        staticmethod(lambda mesh, module, inputs: wrong(mesh, *right(mesh, module, inputs))),
    )


@fault(TENSOR, "loss of step 0", FORWARD)
def one_rank_has_shifted_labels(patch):
    patch_head_inputs(patch, lambda mesh, hidden, labels: (hidden, labels.roll(mesh.get_local_rank(), dims=1)))


# Reductions over the tensor axis.


def counts_tokens_in(patch, name):
    """Makes every rank count its tokens in this method."""

    def wrong(right, self, *args):
        previous, self.context.counts_tokens = self.context.counts_tokens, True
        result = right(self, *args)
        self.context.counts_tokens = previous
        return result

    wrap(patch, Step, name, wrong)


@fault(TENSOR, TOKEN_COUNT, "valid tokens are counted 2 times")
def every_tensor_rank_counts_tokens(patch):
    counts_tokens_in(patch, "_control_vector")


@fault(
    TENSOR,
    "loss of step 0",
    "(factor 2): only the reported loss is wrong: summed over the tensor axis (2) once too often",
)
def every_tensor_rank_reports_the_loss(patch):
    after_init(patch, Step, lambda self, *_: setattr(self.context, "reports_loss", True))


@fault(TENSOR, "gradient norm of step 0", RANKS_MISSING)
def gradient_norm_is_of_local_tensor_shards(patch):
    replace_all_reduce(patch, "gradient norm", skip_all_reduce)


@fault(TENSOR, "gradient norm of step 0", COUNTED_TWICE)
def gradient_norm_counts_replicated_weights_on_every_tensor_rank(patch):  # TransformerEngine PR#715
    count_every_shard(patch)


@fault(TENSOR, FIRST_NORM, NORM_WEIGHTS)
def norm_weight_gradients_are_not_reduced(patch):
    patch.setattr(parallel_model, "reduce_partial_gradients", lambda *_: None)


def use_local_norm_weights(patch):
    """Uses a replicated norm weight as a plain tensor: the gradient of its sequence chunk is taken as complete."""

    def wrong(right, self, x):
        if not isinstance(self.weight, DTensor):
            return right(self, x)
        scaled = rms_norm(x.to_local(), self.weight.shape, eps=self.eps) * self.weight.to_local()
        return DTensor.from_local(scaled, x.device_mesh, x.placements, run_check=False)

    wrap(patch, RMSNorm, "forward", wrong)


@fault(TENSOR, FIRST_NORM, NORM_WEIGHTS)
def norm_weight_gradients_are_taken_as_complete(patch):
    use_local_norm_weights(patch)


@fault(FSDP_TENSOR, FIRST_NORM, NORM_WEIGHTS)
def norm_weight_gradients_are_taken_as_complete_with_fsdp(patch):
    use_local_norm_weights(patch)


@fault(TENSOR, "gradient of decoder.embedding.weight", "correct down to head.weight", WRONG_BELOW)
def head_backward_is_not_reduced(patch):  # torchtitan PR#1373
    def wrong(mesh, hidden, labels):
        if hidden.requires_grad:
            hidden.register_hook(lambda g: DTensor.from_local(g.to_local(), mesh, [Replicate()], run_check=False))
        return hidden, labels

    patch_head_inputs(patch, wrong)


@fault(TENSOR, "gradient of decoder.blocks.0.attention.out.weight", INCOMPLETE)
def row_sharded_gradients_are_all_reduced(patch):
    def wrong(right, parameters, mesh):
        every = list(parameters)
        right(every, mesh)
        for p in every:
            if p.grad is not None and p.placements == (Shard(1),):
                dist.all_reduce(p.grad.to_local(), group=mesh.get_group())

    wrap(patch, parallel_model, "reduce_partial_gradients", wrong)


@fault((*TENSOR, *TIED), "gradient of decoder.embedding.weight", TIED_WEIGHT)
def tensor_parallelism_separates_a_tied_weight(patch):
    def cut(model, of, mesh):
        parallelize_module(model, mesh, dict(of.tp_plan()), src_data_rank=None)

    patch.setattr(parallelize, "apply_tensor_parallel", cut)
    map_result(patch, Materializer, "initialize", initialize_both_ends_alike)


# Evaluation.


@fault((*REPLICATE, "--eval.holdout=0.05"), "evaluation after step", EVALUATION)
def evaluation_counts_padding_samples(patch):
    def fill(self, *_):
        self.micro_batches += [self.padding] * (self.passes - len(self.micro_batches))

    after_init(patch, Evaluation, fill)


@fault(REPLICATE, "evaluation after step", EVALUATION, runs=(VARIATION,))
def evaluation_averages_means_of_ranks(patch):
    replace_all_reduce(patch, "evaluation sum", lambda world, right, pair: right(pair / pair[1]))


@fault(REPLICATE, "evaluation after step", EVALUATION, runs=(VARIATION,))
def evaluation_drops_incomplete_micro_batches(patch):
    def drop(self, *_):
        self.micro_batches = [ids for ids in self.micro_batches if len(ids) == 2]

    after_init(patch, Evaluation, drop)
