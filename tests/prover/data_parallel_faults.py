"""Seeded faults of DDP and FSDP: normalization, synchronization, gradient norm and optimizer update."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshwright.core.optim.interface import Optimizer
from meshwright.core.parallel import parallel_spec
from meshwright.core.parallel.data_parallel import ddp, fsdp
from meshwright.core.parallel.data_parallel.ddp import DDPModel
from meshwright.core.parallel.data_parallel.fsdp import FSDPModel
from meshwright.core.parallel.materialize import Materializer
from meshwright.core.trainer.step import Step
from tests.prover.seeded_faults import (
    COUNTED_TWICE,
    HYBRID_SHARD,
    INCOMPLETE,
    LOCAL_NORM,
    RANKS_MISSING,
    REPLICATE,
    SHARD_GRADIENTS,
    SHARD_OPTIMIZER,
    SHARD_PARAMETERS,
    STALE,
    TIED,
    TIED_WEIGHT,
    TOKEN_COUNT,
    UPDATE,
    WRONG_BELOW,
    after_init,
    fault,
    initialize_both_ends_alike,
    map_result,
    replace_all_reduce,
    skip_all_reduce,
    wrap,
)
from tests.prover.traced_cases import AS_CONFIGURED, FLOAT64


def divide_loss_by(patch, count_tokens):
    """Divides the loss by another number of tokens."""
    map_result(
        patch,
        Step,
        "_read_control",
        lambda control, _self, _step, batches, _sums: replace(control, tokens=count_tokens(control.tokens, batches)),
    )


# Normalization of gradients.


@fault(REPLICATE, "gradient of", "(factor 0.5): averaged over the replicate axis (2)", runs=(FLOAT64, AS_CONFIGURED))
def ddp_averages_gradients_of_a_normalized_loss(patch):  # torchtitan PR#2323
    right = ddp.reduce_bucket
    patch.setattr(
        ddp, "reduce_bucket", lambda state, bucket: right(state, bucket).then(lambda done: done.value().div_(2))
    )


@fault(SHARD_PARAMETERS, "gradient of", "(factor 0.5): averaged over the shard axis (2)", runs=(FLOAT64, AS_CONFIGURED))
def fsdp_averages_gradients(patch):
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)
    patch.setattr(FSDPModule, "set_force_sum_reduction_for_comms", lambda *_: None)


@fault(SHARD_PARAMETERS, "gradient of", "(factor 0.5): averaged over the shard axis (2)", runs=(FLOAT64, AS_CONFIGURED))
def fsdp_sums_and_then_divides_gradients(patch):
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)


@fault(HYBRID_SHARD, "gradient of", "(factor 0.25): averaged over the 4 data-parallel ranks")
def hsdp_averages_gradients(patch):
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)


@fault(REPLICATE, TOKEN_COUNT, "valid tokens are counted 0.5 times")
def loss_is_divided_by_local_tokens(patch):  # torchtitan#2206
    divide_loss_by(patch, lambda tokens, batches: sum(batch.valid_targets for batch in batches))


@fault(REPLICATE, TOKEN_COUNT, "valid tokens are counted 3 times")
def loss_is_divided_by_the_micro_batches(patch):
    divide_loss_by(patch, lambda tokens, batches: tokens * len(batches))


@fault(REPLICATE, TOKEN_COUNT)
def loss_is_the_mean_of_micro_batch_means(patch):  # transformers PR#34191
    divide_loss_by(patch, lambda tokens, batches: 6)
    map_result(patch, DDPModel, "__call__", lambda out, *_: (out[0] / out[1].clamp(min=1), out[1]))


@fault(REPLICATE, TOKEN_COUNT, "valid tokens are counted 2 times")
def loss_is_divided_by_the_world_size(patch):  # accelerate#1839
    divide_loss_by(patch, lambda tokens, batches: tokens * 2)


# The reported loss.


@fault(REPLICATE, "loss of step 0", "only the reported loss is wrong: it is not summed over all ranks")
def reported_loss_is_of_one_rank(patch):
    replace_all_reduce(patch, "loss sum", skip_all_reduce)


@fault(
    REPLICATE, "loss of step 0", "(factor 0.5): only the reported loss is wrong: averaged over the replicate axis (2)"
)
def reported_loss_is_averaged_twice(patch):  # torchtitan#3329
    replace_all_reduce(patch, "loss sum", lambda world, right, total: right(total / 2))


# Synchronization of gradients.


@fault(REPLICATE, "gradient of", INCOMPLETE)
def ddp_synchronizes_every_micro_batch(patch):
    patch.setattr(DDPModel, "micro_step", lambda self, last: nullcontext())


@fault(REPLICATE, "gradient of", INCOMPLETE)
def ddp_never_synchronizes(patch):
    patch.setattr(DDPModel, "micro_step", lambda self, last: self.ddp.no_sync())


@fault(REPLICATE, "gradient of", INCOMPLETE)
def ddp_learns_of_the_last_micro_batch_after_forward(patch):  # build-nanogpt PR#30
    def late(out, self, *_):
        self.ddp.require_backward_grad_sync = getattr(self, "last", True)
        return out

    @contextmanager
    def micro_step(self, last):
        self.last = last
        yield

    map_result(patch, DDPModel, "__call__", late)
    patch.setattr(DDPModel, "micro_step", micro_step)


@fault((*REPLICATE, "--ddp.bucket_cap_mb=0.001"), "gradient of decoder.embedding.weight", WRONG_BELOW)
def ddp_skips_the_last_bucket(patch):
    right = ddp.reduce_bucket

    def forgets(state, bucket):
        if not bucket.is_last():
            return right(state, bucket)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    patch.setattr(ddp, "reduce_bucket", forgets)


@fault(REPLICATE, "gradient of", INCOMPLETE)
def only_the_last_micro_batch_is_accumulated(patch):
    def forget(right, self, last):
        self.module.zero_grad()
        return right(self, last)

    wrap(patch, DDPModel, "micro_step", forget)


@fault(SHARD_GRADIENTS, "gradient of", INCOMPLETE)
def last_micro_batch_is_not_reduce_scattered(patch):
    right = FSDPModel.micro_step

    @contextmanager
    def wrong(self, last):
        with right(self, last):
            self.root.set_requires_gradient_sync(not last)
            yield

    patch.setattr(FSDPModel, "micro_step", wrong)


@fault(HYBRID_SHARD, "gradient of", INCOMPLETE)
def hsdp_mesh_lacks_the_replicate_axis(patch):
    wrap(patch, fsdp, "fully_shard", lambda right, unit, mesh, **rest: right(unit, mesh=mesh["shard"], **rest))


@fault(SHARD_PARAMETERS, "gradient of", "(factor 1): complete but rounded", runs=(FLOAT64, AS_CONFIGURED))
def gradients_are_reduced_in_bf16(patch):
    map_result(patch, fsdp, "mixed_precision_policy", lambda policy, *_: replace(policy, reduce_dtype=torch.bfloat16))


@fault((*SHARD_PARAMETERS, *TIED), "gradient of decoder.embedding.weight", TIED_WEIGHT)
def tied_weight_is_in_two_fsdp_units(patch):
    def units(model, of):
        first, *rest = (
            [m for name in group for m in parallel_spec.find_modules(model, name)] for group in (of.before, of.after)
        )
        return [first, *([block] for block in parallel_spec.find_blocks(model, of)), *rest], first

    patch.setattr(fsdp, "fsdp_units", units)
    map_result(patch, Materializer, "initialize", initialize_both_ends_alike)


# The gradient norm.


@fault(SHARD_PARAMETERS, "gradient norm of step 0", RANKS_MISSING)
def gradient_norm_is_of_local_shards(patch):  # torchtitan#596
    replace_all_reduce(patch, "gradient norm", skip_all_reduce)


def count_every_shard(patch):
    after_init(patch, Optimizer, lambda self, *_: setattr(self, "counts_in_norm", [True] * len(self.counts_in_norm)))


@fault(HYBRID_SHARD, "gradient norm of step 0", "(factor 1.414)", COUNTED_TWICE)
def gradient_norm_counts_every_replica(patch):
    count_every_shard(patch)


# The optimizer update.


@fault(REPLICATE, "update of", UPDATE + "the gradients are not clipped")
def gradients_are_not_clipped(patch):
    after_init(patch, Optimizer, lambda self, *_: setattr(self, "clip", 0.0))


@fault(REPLICATE, "update of", UPDATE + "the gradients are clipped twice")
def gradients_are_clipped_twice(patch):
    def twice(right, self, lr, norm, *rest):
        right(self, lr, norm * norm / self.clip, *rest)

    wrap(patch, Optimizer, "update", twice)


@fault(SHARD_PARAMETERS, "update of", UPDATE + LOCAL_NORM)
def each_rank_clips_by_its_local_norm(patch):
    def wrong(right, self, lr, _norm, *rest):
        local_norm = torch.stack([gradient.square().sum() for gradient, _ in self.gradients()]).sum().sqrt()
        right(self, lr, local_norm, *rest)

    wrap(patch, Optimizer, "update", wrong)


@fault(SHARD_PARAMETERS, "norm.weight in step 0", UPDATE + "weight decay applies to vectors, too")
def norm_weights_are_decayed(patch):
    def decay(self, *_):
        for group in self.rules[0].optimizer.param_groups:
            group["weight_decay"] = 0.1

    after_init(patch, Optimizer, decay)


@fault(SHARD_PARAMETERS, "in step 1", UPDATE + "the first moment is lost")
def moments_are_reset_every_step(patch):
    def forget(_, self, *__):
        for state in self.rules[0].optimizer.state.values():
            state["exp_avg"].zero_()

    map_result(patch, Optimizer, "update", forget)


@fault(REPLICATE, "rank 1 step 0: the value of decoder.embedding.weight differs")
def one_replica_is_not_updated(patch):
    wrap(patch, Optimizer, "update", lambda right, self, *rest: dist.get_rank() or right(self, *rest))


def keep_unsharded(patch):
    wrap(patch, FSDPModule, "set_reshard_after_backward", lambda right, self, _last: right(self, False))


@fault(SHARD_OPTIMIZER, "loss of step 1", STALE)
def parameters_stay_unsharded_over_an_update(patch):
    keep_unsharded(patch)


@fault(SHARD_GRADIENTS, "loss of step 1", STALE)
def parameters_stay_unsharded_with_sharded_gradients(patch):
    keep_unsharded(patch)


@fault((*SHARD_PARAMETERS, "--optimizer.cpu_offload=true"), "update of", UPDATE + "the parameter is not updated")
def offloaded_update_is_not_copied_back(patch):
    def wrong(right, self, *rest):
        before = [block.local.clone() for block in self.shards]
        right(self, *rest)
        for block, value in zip(self.shards, before, strict=True):
            block.local.copy_(value)

    wrap(patch, Optimizer, "update", wrong)
