"""Every seeded fault of pipelines, of sequences in pieces and of experts is caught and named.

Those of pieces and experts come from hybrid_faults.py; here are those of pipelines.
"""

from __future__ import annotations

import pytest
import torch
from hybrid_faults import EVALUATION, FAULTS, every_rank_counts_evaluation_tokens, fault
from layout_faults import (
    INCOMPLETE,
    SOME_RANKS,
    TIED,
    UPDATE,
    born,
    broken_without,
    catch,
    layouts_of,
    sums,
    unsummed,
    wrap,
)
from torch.distributed.fsdp import FSDPModule

from meshwright.optim.adamw import AdamW
from meshwright.parallel.data_parallel import fsdp
from meshwright.parallel.pipeline_parallel import pipeline_model
from meshwright.parallel.pipeline_parallel.pipeline_model import PipelineModel, TrackedStage
from meshwright.parallel.pipeline_parallel.stages import Stage, TiedWeight
from meshwright.topology import parameter_shards

STAGES = ("--layout.replicate=1", "--layout.pipeline=2", "--model.layers=2")
SPLIT = (*STAGES, "--pipeline.schedule=zero-bubble", "--pipeline.stages=1")
LOOP = (*STAGES, "--pipeline.schedule=interleaved", "--model.layers=4")
COPIES_OF_STAGES = (*STAGES, "--layout.replicate=2")

ORDER = "the order of stages, or activations and labels of different micro-batches (pipeline)"
DEFERRED = "a stage lacks the weight gradients of a micro-batch (pipeline)"
HEADS_USE = "the head's use of a tied weight is missing, or not added once (pipeline)"
FOLLOWS = "the head's copy of a tied weight does not follow (pipeline)"
OWN_NORM = "a stage that does not clip by the norm of all (pipeline)"


@fault(STAGES, "gradient of", "0.3333 times the right one: averaged over the pipeline's 3 micro-batches once too often")
def the_schedule_averages_what_was_divided(patch):  # torch's default, scale_grads
    class Averaging(pipeline_model.Schedule1F1B):
        def __init__(self, *args, **options):
            super().__init__(*args, **options | {"scale_grads": True})

    patch.setitem(pipeline_model.SCHEDULES, "1f1b", Averaging)


@fault(COPIES_OF_STAGES, "gradient of", "0.5 times the right one: averaged over replicate (2) once too often")
def copies_of_stages_are_averaged(patch):
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)


@fault(COPIES_OF_STAGES, "gradient of", INCOMPLETE)
def copies_of_stages_do_not_meet(patch):
    wrap(patch, fsdp, "fully_shard", lambda right, unit, mesh, **rest: right(unit, mesh=mesh["shard"], **rest))


@fault(STAGES, "loss of step 0", ORDER)
def stages_have_each_others_blocks(patch):
    wrap(patch, parameter_shards, "partition_blocks", lambda right, *args: right(*args)[::-1])


@fault(LOOP, "loss of step 0", ORDER)
def a_rank_runs_the_middle_stages_out_of_order(patch):
    wrap(patch, parameter_shards, "partition_blocks", lambda right, *args: [right(*args)[i] for i in (0, 2, 1, 3)])


@fault(STAGES, "loss of step 0", ORDER)
def labels_are_those_of_another_micro_batch(patch):
    def wrong(right, self, micro_batches, *rest):
        labels = [labels for _, labels in micro_batches]
        turned = zip(micro_batches, labels[1:] + labels[:1], strict=True)
        return right(self, [(tokens, other) for (tokens, _), other in turned], *rest)

    wrap(patch, PipelineModel, "forward_backward", wrong)


@fault(STAGES, "loss of step 0", ORDER)
def a_stage_takes_the_rows_that_come_in_another_order(patch):
    def wrong(right, self, x, *rest, **named):
        return right(self, x if self.embedding is not None else x.flip(0), *rest, **named)

    wrap(patch, Stage, "forward", wrong)


@fault(SPLIT, "gradient of", DEFERRED)
def a_deferred_weight_gradient_is_forgotten(patch):
    def wrong(right, self, chunk, *rest, **options):
        if self.stage_index == 0 or chunk:
            right(self, chunk, *rest, **options)

    wrap(patch, TrackedStage, "backward_weight_one_chunk", wrong)


@fault(STAGES, "loss of step 0", "0.5 times the right one: averaged over pipeline (2) once too often")
def tokens_are_counted_on_every_stage(patch):
    patch.setattr("meshwright.topology.layout.Layout.counts_tokens", lambda self, rank: True)


@fault(STAGES, "loss of step 0", "the loss alone is: it is not the sum over ranks")
def the_first_stage_reports_a_loss_of_its_own(patch):
    sums(patch, "loss sum", unsummed)


@fault(STAGES, "evaluation loss", "0.5 times the right one", EVALUATION)
def evaluation_counts_tokens_on_every_stage(patch):
    every_rank_counts_evaluation_tokens(patch)


@fault(STAGES, "gradient norm of step 0", SOME_RANKS)
def the_norm_is_of_one_stage(patch):
    born(patch, AdamW, lambda self, *_: setattr(self, "sharded", False))


@fault(STAGES, "loss of step 1", UPDATE, OWN_NORM)
def a_stage_clips_by_its_own_norm(patch):
    def wrong(right, self, lr, _norm, *rest):
        own = torch.stack([gradient.square().sum() for gradient, _ in self.gradients()]).sum().sqrt()
        right(self, lr, own, *rest)

    wrap(patch, AdamW, "update", wrong)


@fault(STAGES, "gradient of decoder.embedding.weight", HEADS_USE, proofs=(TIED,))
def the_heads_gradient_does_not_reach_the_embedding(patch):
    def wrong(self):
        if self.copy is not None:
            self.copy.grad = None

    patch.setattr(TiedWeight, "sum_gradients", wrong)


@fault(STAGES, "loss of step 1", UPDATE, FOLLOWS, proofs=(TIED,))
def the_embeddings_value_does_not_reach_the_head(patch):
    patch.setattr(TiedWeight, "broadcast_value", lambda self: None)


def test_there_are_40_faults():
    assert len(FAULTS) == 40


@pytest.mark.parametrize("layout", layouts_of(FAULTS), ids=" ".join)
def test_without_a_fault_a_layout_keeps_its_promises(layout, monkeypatch):
    assert broken_without(FAULTS, layout, monkeypatch) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_caught_and_named(name, monkeypatch):
    catch(FAULTS[name], monkeypatch)
