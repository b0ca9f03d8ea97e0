"""Seeded faults of copies and shards: each breaks one line of the training path, as systems in use have been broken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from meshwright.config import load_config
from meshwright.optim.adamw import AdamW
from meshwright.parallel import parallel_spec
from meshwright.parallel.data_parallel import ddp, fsdp
from meshwright.parallel.data_parallel.ddp import DDPModel
from meshwright.parallel.data_parallel.fsdp import FSDPModel
from meshwright.parallel.local_shard import local_shard
from meshwright.parallel.materialize import Materializer
from meshwright.parallel.world import PendingAllReduce, World
from meshwright.prover import layouts
from meshwright.trainer.step import Step

COPIES = ("--layout.replicate=2",)
OPTIMIZER = (*COPIES, "--layout.shard=optimizer")
GRADIENTS = (*COPIES, "--layout.shard=gradients")
PARAMETERS = (*COPIES, "--layout.shard=parameters")
COPIES_OF_SHARDS = (*PARAMETERS, "--layout.shard_degree=2")

FP64, FP32, TIED = 0, 1, 2
"""The proofs that `layouts.variants` makes of an untied model, in its order."""

INCOMPLETE = "gradients of ranks or micro-steps are not all there, or not each once"
UNWEIGHED = "tokens not weighed alike"
BELOW = "and not below: a bucket, a recomputation or a sum over tensor"
TWO_USES = "the two uses of a tied weight, or the vocabulary's rows, are not put together"
SOME_RANKS = "not every rank's part is counted"
TOO_OFTEN = "weights that ranks hold alike are counted more than once"
UPDATE = "gradients and norm are right, the update is not: clipping, decay or moments"
STALE = "stale parameters: the step before did not reach what was gathered"


@dataclass(frozen=True)
class Fault:
    layout: tuple[str, ...]
    says: tuple[str, ...]
    """what every broken promise must say"""
    proofs: tuple[int, ...]
    """which of them are made; all must break"""
    sow: Callable


FAULTS: dict[str, Fault] = {}
ALONE: dict[str, list] = {}
SMALL = (
    "--model.layers=1",
    "--model.width=16",
    "--model.heads=2",
    "--model.kv_heads=2",
    "--model.ffn=18",
    "--model.vocab=26",
)


def fault(layout: tuple[str, ...], *says: str, proofs: tuple[int, ...] = (FP64,), among: dict = FAULTS) -> Callable:
    def enter(sow: Callable) -> Callable:
        among[sow.__name__.replace("_", " ")] = Fault(layout, says, proofs, sow)
        return sow

    return enter


def found(words, proofs, patch, sow=lambda _patch: None, small=SMALL):
    """What is found by those proofs alone that are asked for. What one process does is computed once, before a fault is
    sown; the ranks are forked after.
    """
    variants, run_ranks = layouts.proof_configs, layouts.run_ranks

    def fewer(config):
        every, note = variants(config)
        return [every[index] for index in proofs], note

    def once(work, count, configs, **options):
        if work is not layouts.alone:
            sow(patch)
            return run_ranks(work, count, configs, **options)
        if (key := repr(configs)) not in ALONE:
            ALONE[key] = run_ranks(work, count, configs, **options)
        return ALONE[key]

    patch.setattr(layouts, "proof_configs", fewer)
    patch.setattr(layouts, "run_ranks", once)
    return list(layouts.check_layouts(load_config(overrides=[*small, *words])))


def layouts_of(faults):
    return sorted({fault.layout for fault in faults.values()})


def broken_without(faults, layout, patch):
    """What a layout breaks of the proofs that its faults are to break."""
    proofs = sorted({index for fault in faults.values() if fault.layout == layout for index in fault.proofs})
    return [(promise, measured) for promise, kept, measured in found(layout, proofs, patch) if not kept]


def catch(seeded, patch):
    for promise, kept, measured in found(seeded.layout, seeded.proofs, patch, seeded.sow):
        assert not kept, f"not caught: {promise}"
        assert all(words in measured for words in seeded.says), measured


def wrap(patch, owner, name, wrong):
    """`wrong(right, *args)` in place of `right(*args)`."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **options: wrong(right, *args, **options))


def after(patch, owner, name, then):
    """`then(result, *args)` in place of the result."""
    wrap(patch, owner, name, lambda right, *args, **options: then(right(*args, **options), *args))


def born(patch, owner, then):
    """`then(self, *args)` once one is made."""

    def wrong(right, self, *args, **options):
        right(self, *args, **options)
        then(self, *args)

    wrap(patch, owner, "__init__", wrong)


def sums(patch, name, wrong):
    """`wrong(world, right, tensor)` in place of the sum over ranks of this name."""

    def choose(right, world, tensor, called="sum"):
        return (
            wrong(world, partial(right, world, name=called), tensor) if called == name else right(world, tensor, called)
        )

    wrap(patch, World, "all_reduce", choose)


def unsummed(world, _right, tensor):
    return PendingAllReduce(tensor, None, world.heartbeat)


def divides_by(patch, tokens_of):
    """The loss is divided by another count of tokens."""
    after(
        patch,
        Step,
        "_agree",
        lambda agreed, _self, _step, batches, _sums: replace(agreed, tokens=tokens_of(agreed.tokens, batches)),
    )


# What a gradient is divided by.


@fault(COPIES, "gradient of", "0.5 times the right one: averaged over replicate (2)", proofs=(FP64, FP32))
def ddp_averages_what_was_divided(patch):  # torchtitan PR#2323
    right = ddp.reduce_bucket
    patch.setattr(
        ddp, "reduce_bucket", lambda state, bucket: right(state, bucket).then(lambda done: done.value().div_(2))
    )


@fault(PARAMETERS, "gradient of", "0.5 times the right one: averaged over shard (2)", proofs=(FP64, FP32))
def fsdp_is_left_to_its_mean(patch):
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)
    patch.setattr(FSDPModule, "set_force_sum_reduction_for_comms", lambda *_: None)


@fault(PARAMETERS, "gradient of", "0.5 times the right one: averaged over shard (2)", proofs=(FP64, FP32))
def fsdp_sums_and_divides(patch):
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)


@fault(COPIES_OF_SHARDS, "gradient of", "0.25 times the right one: averaged over the 4 data-parallel ranks")
def copies_of_shards_are_averaged(patch):
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)


@fault(COPIES, "loss of step 0", UNWEIGHED)
def loss_divided_by_local_tokens(patch):  # torchtitan#2206
    divides_by(patch, lambda tokens, batches: sum(batch.valid_targets for batch in batches))


@fault(COPIES, "loss of step 0", "0.3333 times the right one: divided by the 3 micro-steps")
def divided_by_the_micro_steps(patch):
    divides_by(patch, lambda tokens, batches: tokens * len(batches))


@fault(COPIES, "loss of step 0", UNWEIGHED)
def mean_of_the_micro_steps_means(patch):  # transformers PR#34191
    divides_by(patch, lambda tokens, batches: 6)
    after(patch, DDPModel, "__call__", lambda out, *_: (out[0] / out[1].clamp(min=1), out[1]))


@fault(COPIES, "loss of step 0", "0.5 times the right one: averaged over replicate (2)")
def divided_by_the_ranks_too(patch):  # accelerate#1839
    divides_by(patch, lambda tokens, batches: tokens * 2)


# What is reported.


@fault(COPIES, "loss of step 0", "the loss alone is: it is not the sum over ranks")
def loss_reported_by_one_rank(patch):
    sums(patch, "loss sum", unsummed)


@fault(COPIES, "loss of step 0", "0.5 times the right one: the loss alone is: averaged over replicate (2)")
def loss_reported_averaged_once_more(patch):  # torchtitan#3329
    sums(patch, "loss sum", lambda world, right, total: right(total / 2))


# When gradients meet.


@fault(COPIES, "gradient of", INCOMPLETE)
def ddp_meets_at_every_micro_step(patch):
    patch.setattr(DDPModel, "micro_step", lambda self, last: nullcontext())


@fault(COPIES, "gradient of", INCOMPLETE)
def ddp_never_meets(patch):
    patch.setattr(DDPModel, "micro_step", lambda self, last: self.ddp.no_sync())


@fault(COPIES, "gradient of", INCOMPLETE)
def ddp_hears_of_the_last_micro_step_after_its_forward(patch):  # build-nanogpt PR#30
    def late(out, self, *_):
        self.ddp.require_backward_grad_sync = getattr(self, "last", True)
        return out

    @contextmanager
    def micro_step(self, last):
        self.last = last
        yield

    after(patch, DDPModel, "__call__", late)
    patch.setattr(DDPModel, "micro_step", micro_step)


@fault((*COPIES, "--ddp.bucket_cap_mb=0.001"), "gradient of decoder.embedding.weight", BELOW)
def ddp_forgets_the_last_bucket(patch):
    right = ddp.reduce_bucket

    def forgets(state, bucket):
        if not bucket.is_last():
            return right(state, bucket)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    patch.setattr(ddp, "reduce_bucket", forgets)


@fault(COPIES, "gradient of", INCOMPLETE)
def only_the_last_micro_step_is_kept(patch):
    def forget(right, self, last):
        self.module.zero_grad()
        return right(self, last)

    wrap(patch, DDPModel, "micro_step", forget)


@fault(GRADIENTS, "gradient of", INCOMPLETE)
def the_last_micro_step_is_not_scattered(patch):
    right = FSDPModel.micro_step

    @contextmanager
    def wrong(self, last):
        with right(self, last):
            self.root.set_requires_gradient_sync(not last)
            yield

    patch.setattr(FSDPModel, "micro_step", wrong)


@fault(COPIES_OF_SHARDS, "gradient of", INCOMPLETE)
def copies_of_shards_are_left_out_of_the_mesh(patch):
    wrap(patch, fsdp, "fully_shard", lambda right, unit, mesh, **rest: right(unit, mesh=mesh["shard"], **rest))


@fault(PARAMETERS, "gradient of", "1 times the right one: all there, but rounded", proofs=(FP64, FP32))
def gradients_are_summed_in_bf16(patch):
    after(patch, fsdp, "mixed_precision_policy", lambda policy, *_: replace(policy, reduce_dtype=torch.bfloat16))


@fault(PARAMETERS, "gradient of decoder.embedding.weight", TWO_USES, proofs=(TIED,))
def a_tied_weight_is_gathered_in_two_units(patch):
    def units(model, of):
        first, *rest = (
            [m for name in group for m in parallel_spec.find_modules(model, name)] for group in of.outer_modules
        )
        return [first, *([block] for block in parallel_spec.find_blocks(model, of)), *rest], first

    patch.setattr(fsdp, "fsdp_units", units)
    after(patch, Materializer, "initialize", both_ends_begin_alike)


def both_ends_begin_alike(_result, weights, _module):
    """With the values that they should share."""
    weights.content(local_shard(weights.model.head.weight), "decoder.embedding.weight")


# The norm.


@fault(PARAMETERS, "gradient norm of step 0", SOME_RANKS)
def norm_of_this_ranks_shards(patch):  # torchtitan#596
    sums(patch, "gradient norm", unsummed)


def all_count(patch):
    born(patch, AdamW, lambda self, *_: setattr(self, "counts_in_norm", [True] * len(self.counts_in_norm)))


@fault(COPIES_OF_SHARDS, "gradient norm of step 0", "1.414 times the right one", TOO_OFTEN)
def norm_counts_every_copy(patch):
    all_count(patch)


# The update.


@fault(COPIES, "loss of step 1", UPDATE)
def gradients_are_not_clipped(patch):
    born(patch, AdamW, lambda self, *_: setattr(self, "clip", 0.0))


@fault(COPIES, "loss of step 1", UPDATE)
def gradients_are_clipped_twice(patch):
    def twice(right, self, lr, norm, *rest):
        right(self, lr, norm * norm / self.clip, *rest)

    wrap(patch, AdamW, "update", twice)


@fault(PARAMETERS, "loss of step 1", UPDATE)
def each_rank_clips_by_its_own_norm(patch):
    def wrong(right, self, lr, _norm, *rest):
        own = torch.stack([gradient.square().sum() for gradient, _ in self.gradients()]).sum().sqrt()
        right(self, lr, own, *rest)

    wrap(patch, AdamW, "update", wrong)


@fault(PARAMETERS, "loss of step 1", UPDATE)
def norms_are_decayed(patch):
    def decay(self, *_):
        for group in self.adamw.param_groups:
            group["weight_decay"] = 0.1

    born(patch, AdamW, decay)


@fault(PARAMETERS, "loss of step 2", UPDATE)
def moments_do_not_outlive_a_step(patch):
    def forget(_, self, *__):
        for state in self.adamw.state.values():
            state["exp_avg"].zero_()

    after(patch, AdamW, "update", forget)


@fault(COPIES, "loss of step 1", UPDATE)
def one_copy_is_not_updated(patch):
    wrap(patch, AdamW, "update", lambda right, self, *rest: dist.get_rank() or right(self, *rest))


def stays_gathered(patch):
    wrap(patch, FSDPModule, "set_reshard_after_backward", lambda right, self, _last: right(self, False))


@fault(OPTIMIZER, "loss of step 1", STALE)
def parameters_stay_gathered_over_an_update(patch):
    stays_gathered(patch)


@fault(GRADIENTS, "loss of step 1", STALE)
def parameters_stay_gathered_where_gradients_are_divided(patch):
    stays_gathered(patch)


@fault((*PARAMETERS, "--optimizer.cpu_offload=true"), "loss of step 1", STALE)
def an_offloaded_update_does_not_come_back(patch):
    def wrong(right, self, *rest):
        before = [block.local.clone() for block in self.shards]
        right(self, *rest)
        for block, value in zip(self.shards, before, strict=True):
            block.local.copy_(value)

    wrap(patch, AdamW, "update", wrong)
