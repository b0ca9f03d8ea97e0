"""Seeded faults of pipeline parallelism."""

from __future__ import annotations

import torch
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule

from meshwright.base.topology import parameter_shards
from meshwright.core.optim.interface import Optimizer
from meshwright.core.parallel.data_parallel import fsdp
from meshwright.core.parallel.pipeline_parallel.pipeline_model import PipelineModel, TrackedStage
from meshwright.core.parallel.pipeline_parallel.stages import Stage
from meshwright.core.parallel.pipeline_parallel.tied_weights import TiedWeight
from tests.prover.context_expert_faults import every_rank_counts_evaluation_tokens
from tests.prover.seeded_faults import (
    EVALUATION,
    INCOMPLETE,
    LOCAL_NORM,
    ONE_REPLICA,
    RANKS_MISSING,
    REPLICATE,
    TIED,
    TOKEN_COUNT,
    UPDATE,
    after_init,
    fault,
    replace_all_reduce,
    skip_all_reduce,
    wrap,
)

PIPELINE = (*ONE_REPLICA, "--layout.pipeline=2", "--model.layers=2")
ZERO_BUBBLE = (*PIPELINE, "--pipeline.schedule=zero-bubble", "--pipeline.stages=1")
INTERLEAVED = (*PIPELINE, "--pipeline.schedule=interleaved", "--model.layers=4")
REPLICATED_PIPELINE = (*PIPELINE, *REPLICATE)

STAGE_ORDER = "the order of the stages, or activations and labels of different micro-batches (pipeline)"
TIED_HEAD_GRADIENT = "the head's gradient of a tied weight is missing, or not added exactly once (pipeline)"
TIED_HEAD_VALUE = "the head's copy of a tied weight is not updated (pipeline)"


@fault(PIPELINE, "gradient of", "(factor 0.3333): averaged over the 3 micro-batches of the pipeline once too often")
def pipeline_schedule_averages_gradients_of_a_normalized_loss(patch):  # torch's default, scale_grads
    class Averaging(pipelining.Schedule1F1B):
        def __init__(self, *args, **options):
            super().__init__(*args, **options | {"scale_grads": True})

    patch.setattr(pipelining, "Schedule1F1B", Averaging)


@fault(REPLICATED_PIPELINE, "gradient of", "(factor 0.5): averaged over the replicate axis (2) once too often")
def replicated_stages_average_gradients(patch):
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)


@fault(REPLICATED_PIPELINE, "gradient of", INCOMPLETE)
def replicated_stages_are_not_reduced(patch):
    wrap(patch, fsdp, "fully_shard", lambda right, unit, mesh, **rest: right(unit, mesh=mesh["shard"], **rest))


@fault((*PIPELINE, "--model.layers=4"), "loss of step 0", STAGE_ORDER)
def stages_take_every_second_block(patch):
    patch.setattr(parameter_shards, "partition_blocks", lambda *_: (range(0, 3, 2), range(1, 4, 2)))


@fault(INTERLEAVED, "loss of step 0", STAGE_ORDER)
def interleaved_stages_run_out_of_order(patch):
    wrap(patch, parameter_shards, "partition_blocks", lambda right, *args: [right(*args)[i] for i in (0, 2, 1, 3)])


@fault(PIPELINE, "loss of step 0", STAGE_ORDER)
def labels_are_of_another_micro_batch(patch):
    def wrong(right, self, micro_batches, *rest):
        labels = [labels for _, labels in micro_batches]
        turned = zip(micro_batches, labels[1:] + labels[:1], strict=True)
        return right(self, [(tokens, other) for (tokens, _), other in turned], *rest)

    wrap(patch, PipelineModel, "forward_backward", wrong)


@fault(PIPELINE, "loss of step 0", STAGE_ORDER)
def stage_receives_rows_in_another_order(patch):
    def wrong(right, self, hidden=None, **batch):
        return right(self, hidden if hidden is None else hidden.flip(0), **batch)

    wrap(patch, Stage, "forward", wrong)


@fault(ZERO_BUBBLE, "gradient of", INCOMPLETE, "0 of rank 0 0 times, 1 of rank 0 1 times")
def deferred_weight_gradient_is_skipped(patch):
    def wrong(right, self, chunk, *rest, **options):
        if self.stage_index == 0 or chunk:
            right(self, chunk, *rest, **options)

    wrap(patch, TrackedStage, "backward_weight_one_chunk", wrong)


@fault(PIPELINE, TOKEN_COUNT, "valid tokens are counted 2 times")
def tokens_are_counted_on_every_stage(patch):
    patch.setattr("meshwright.base.topology.layout.Layout.counts_tokens", lambda self, rank: True)


@fault(PIPELINE, "loss of step 0", "only the reported loss is wrong: it is not summed over all ranks")
def first_stage_reports_its_local_loss(patch):
    replace_all_reduce(patch, "loss sum", skip_all_reduce)


@fault(PIPELINE, "token count of the evaluation", "(factor 2)", EVALUATION)
def evaluation_counts_tokens_on_every_stage(patch):
    every_rank_counts_evaluation_tokens(patch)


@fault(PIPELINE, "gradient norm of step 0", RANKS_MISSING)
def gradient_norm_is_of_one_stage(patch):
    after_init(patch, Optimizer, lambda self, *_: setattr(self, "sharded", False))


@fault(PIPELINE, "update of", UPDATE + LOCAL_NORM)
def stage_clips_by_its_local_norm(patch):
    def wrong(right, self, lr, _norm, *rest):
        local_norm = torch.stack([gradient.square().sum() for gradient, _ in self.gradients()]).sum().sqrt()
        right(self, lr, local_norm, *rest)

    wrap(patch, Optimizer, "update", wrong)


@fault((*PIPELINE, *TIED), "gradient of decoder.embedding.weight", TIED_HEAD_GRADIENT)
def tied_head_gradient_does_not_reach_the_embedding(patch):
    def wrong(self, _group):
        if self.tied_copy is not None:
            module, attribute = self.tied_copy
            getattr(module, attribute).grad = None

    patch.setattr(TiedWeight, "sum_gradients", wrong)


@fault((*PIPELINE, *TIED), "loss of step 1", TIED_HEAD_VALUE)
def tied_embedding_value_does_not_reach_the_head(patch):
    patch.setattr(TiedWeight, "broadcast_value", lambda self, _group: None)
