"""The seeded faults of layouts: each breaks one line of the training path, as systems in use have shipped it broken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from meshwright.layout import Layout
from meshwright.model.decoder import RMSNorm
from meshwright.parallel import apply, parts, recompute, replicate, shard, spread
from meshwright.parallel.replicate import Replicated
from meshwright.parallel.shard import Sharded
from meshwright.parallel.tensor import VocabularyEmbedding, VocabularyHead
from meshwright.parallel.weights import Weights
from meshwright.parallel.world import Summing, World
from meshwright.train import loop
from meshwright.train.evaluate import Evaluation
from meshwright.train.optimizer import Optimizer
from meshwright.train.step import Step

Layout_ = tuple[str, ...]
COPIES = ("--layout.replicate=2",)
OPTIMIZER, GRADIENTS, PARAMETERS = ((*COPIES, f"--layout.shard={what}") for what in ("optimizer", "gradients", "parameters"))
COPIES_OF_SHARDS = (*PARAMETERS, "--layout.shard_degree=2")
CUT = ("--layout.replicate=1", "--layout.tensor=2")
SHARDS_OF_CUTS = (*PARAMETERS, "--layout.tensor=2")
RECOMPUTED = (*PARAMETERS, "--compute.recompute=full")
OFFLOADED = (*PARAMETERS, "--compute.offload=true")

FP64, FP32, TIED = 0, 1, 2
"""The proofs that `layouts.variants` makes, in its order; the model here is untied."""


@dataclass(frozen=True)
class Fault:
    layout: tuple[str, ...]
    says: tuple[str, ...]
    """what every broken promise must say"""
    proofs: tuple[int, ...]
    """all of them break"""
    sow: Callable[[MonkeyPatch], None]


FAULTS: dict[str, Fault] = {}


def fault(layout: tuple[str, ...], *says: str, proofs: tuple[int, ...] = (FP64,)) -> Callable:
    def enter(sow: Callable[[MonkeyPatch], None]) -> Callable[[MonkeyPatch], None]:
        FAULTS[sow.__name__.replace("_", " ")] = Fault(layout, says, proofs, sow)
        return sow

    return enter


def wrap(patch: MonkeyPatch, owner: object, name: str, wrong: Callable) -> None:
    """`wrong` gets the right one first."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **options: wrong(right, *args, **options))


def after(patch: MonkeyPatch, owner: object, name: str, then: Callable) -> None:
    """`then(result, *args)` once the right one is done."""

    def wrong(right, *args, **options):
        result = right(*args, **options)
        return then(result, *args, **options)

    wrap(patch, owner, name, wrong)


# Averages, sums and counts.


@fault(COPIES, "loss of step 0", "not each once", proofs=(FP64, FP32))
def x(patch):
    pass


FAULTS.clear()


@fault(COPIES, "gradient of", "0.5 times the right one: averaged over replicate (2) once too often", proofs=(FP64, FP32))
def ddp_averages_what_was_divided(patch):
    mean = lambda done, *_: done.then(lambda f: f.value().div_(2))
    after(patch, replicate, "reduce_bucket", mean)


@fault(PARAMETERS, "gradient of", "0.5 times the right one: averaged over shard (2) once too often", proofs=(FP64, FP32))
def fsdp_is_left_to_its_mean(patch):
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)
    patch.setattr(FSDPModule, "set_force_sum_reduction_for_comms", lambda *_: None)


@fault(PARAMETERS, "gradient of", "0.5 times the right one: averaged over shard (2) once too often", proofs=(FP64, FP32))
def fsdp_keeps_its_divide_factor(patch):
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda *_: None)


@fault(COPIES, "loss of step 0", "")
def loss_divided_by_local_tokens(patch):
    wrap(patch, Step, "_agree", lambda right, self, step, batches, sums: replace(right(self, step, batches, sums), tokens=sum(b.valid for b in batches)))


@fault(COPIES, "loss of step 0", "0.3333 times the right one: divided by the 3 micro-steps")
def divided_by_the_micro_steps(patch):
    after(patch, Step, "_agree", lambda agreed, self, step, batches, sums: replace(agreed, tokens=agreed.tokens * len(batches)))


@fault(COPIES, "loss of step 0")
def mean_of_the_micro_steps_means(patch):
    after(patch, Step, "_agree", lambda agreed, *_: replace(agreed, tokens=1))
    after(patch, Replicated, "__call__", lambda out, *_: (out[0] / out[1].clamp(min=1) / 6, out[1]))


@fault(COPIES, "loss of step 0", "0.5 times the right one: averaged over replicate (2) once too often")
def divided_by_the_ranks_too(patch):
    after(patch, Step, "_agree", lambda agreed, *_: replace(agreed, tokens=agreed.tokens * 2))


def speak(patch, name):
    """Every rank speaks for itself in one method."""

    def wrong(right, self, *args):
        said, self.speaks = self.speaks, True
        try:
            return right(self, *args)
        finally:
            self.speaks = said

    wrap(patch, Step, name, wrong)


@fault(CUT, "loss of step 0", "0.5 times the right one: averaged over tensor (2) once too often")
def tokens_counted_by_every_tensor_rank(patch):
    speak(patch, "_say")


@fault(CUT, "loss of step 0", "2 times the right one: the loss alone is: summed over tensor (2) once too often")
def loss_reported_by_every_tensor_rank(patch):
    right = Step._say

    def init(right_init, self, *args, speaks, **options):
        right_init(self, *args, speaks=True, **options)
        self.alone_speaks = speaks

    def say(self, step, batches):
        self.speaks = self.alone_speaks
        said = right(self, step, batches)
        self.speaks = True
        return said

    wrap(patch, Step, "__init__", init)
    patch.setattr(Step, "_say", say)


def unsummed(patch, name):
    """One sum over ranks, by its name, is not made."""
    wrap(patch, World, "sum", lambda right, self, t, n="sum": Summing(t, None, self.page) if n == name else right(self, t, n))


@fault(COPIES, "loss of step 0", "the loss alone is: it is not the sum over ranks")
def loss_reported_by_one_rank_alone(patch):
    unsummed(patch, "loss sum")


@fault(COPIES, "loss of step 0", "the loss alone is: averaged over replicate (2) once too often")
def loss_reported_averaged_once_more(patch):
    wrap(patch, World, "sum", lambda right, self, t, n="sum": right(self, t / 2 if n == "loss sum" else t, n))


# When gradients meet.


@fault(COPIES, "gradient of", "not each once")
def ddp_meets_at_every_micro_step(patch):
    patch.setattr(Replicated, "micro_step", lambda self, last: nullcontext())


@fault(COPIES, "gradient of", "not all there")
def ddp_never_meets(patch):
    patch.setattr(Replicated, "micro_step", lambda self, last: self.ddp.no_sync())


@fault(COPIES, "gradient of", "not all there")
def ddp_is_told_of_the_last_micro_step_after_its_forward(patch):
    """build-nanogpt#30"""

    def late(out, self, *_):
        self.ddp.require_backward_grad_sync = self.last
        return out

    @contextmanager
    def micro_step(self, last):
        self.last = last
        yield

    after(patch, Replicated, "__call__", late)
    patch.setattr(Replicated, "micro_step", micro_step)


@fault((*COPIES, "--replicate.bucket_mb=0.001"), "gradient of", "not all there")
def ddp_forgets_the_last_bucket(patch):
    def forgets(right, state, bucket):
        if not bucket.is_last():
            return right(state, bucket)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrap(patch, replicate, "reduce_bucket", forgets)


@fault(COPIES, "gradient of", "not all there")
def only_the_last_micro_step_is_kept(patch):
    def forget(right, self, last):
        self.module.zero_grad()
        return right(self, last)

    wrap(patch, Replicated, "micro_step", forget)


@fault(COPIES_OF_SHARDS, "gradient of", "not all there")
def copies_of_shards_never_meet(patch):
    wrap(patch, FSDPModule, "set_requires_all_reduce", lambda right, self, _yes: right(self, False))


@fault(GRADIENTS, "gradient of")
def the_last_micro_step_is_not_scattered(patch):
    right = FSDPModule.set_requires_gradient_sync

    def wrong(right, self, last):
        with right(self, last):
            self.root.set_requires_gradient_sync(not last)
            yield

    patch.setattr(Sharded, "micro_step", contextmanager(partial(wrong, Sharded.micro_step)))


@fault(PARAMETERS, "gradient of", "")
def gradients_are_summed_in_bf16(patch):
    after(patch, shard, "policy", lambda policy, *_, **__: replace(policy, reduce_dtype=torch.bfloat16))


# The norm and the update.


@fault(PARAMETERS, "gradient norm of step 0", "not every rank's part is counted")
def norm_of_this_ranks_shards(patch):
    unsummed(patch, "gradient norm")


@fault(CUT, "gradient norm of step 0", "not every rank's part is counted")
def norm_of_this_ranks_cut(patch):
    unsummed(patch, "gradient norm")


@fault(CUT, "gradient norm of step 0", "weights that ranks hold alike are counted more than once")
def norm_counts_what_every_tensor_rank_holds(patch):
    after(patch, Optimizer, "__init__", lambda _, self, *__: setattr(self, "counted", [True] * len(self.counted)))


@fault(COPIES_OF_SHARDS, "gradient norm of step 0", "weights that ranks hold alike are counted more than once")
def norm_counts_every_copy(patch):
    after(patch, Optimizer, "__init__", lambda _, self, *__: setattr(self, "counted", [True] * len(self.counted)))


UPDATE = "gradients and norm are right, the update is not: clipping, decay or moments"


@fault(COPIES, "loss of step 1", UPDATE)
def gradients_are_not_clipped(patch):
    after(patch, Optimizer, "__init__", lambda _, self, *__: setattr(self, "clip", 0.0))


@fault(COPIES, "loss of step 1", UPDATE)
def gradients_are_clipped_twice(patch):
    wrap(patch, Optimizer, "update", lambda right, self, lr, norm, *rest: right(self, lr, norm * norm / self.clip, *rest))


@fault(PARAMETERS, "loss of step 1", UPDATE)
def each_rank_clips_by_its_own_norm(patch):
    def wrong(right, self, lr, norm, scale, finite):
        own = torch.stack([g.square().sum() for g, _ in self.gradients()]).sum().sqrt()
        return right(self, lr, own, scale, finite)

    wrap(patch, Optimizer, "update", wrong)


@fault(PARAMETERS, "loss of step 1", UPDATE)
def norms_are_decayed(patch):
    def decay(_, self, *__):
        for group in self.adamw.param_groups:
            group["weight_decay"] = 0.1

    after(patch, Optimizer, "__init__", decay)


@fault(COPIES, "loss of step 1", UPDATE)
def one_copy_is_not_updated(patch):
    wrap(patch, Optimizer, "update", lambda right, self, *args: right(self, *args) if dist.get_rank() == 0 else None)


STALE = "stale parameters: the step before did not reach what was gathered"


def stays_gathered(patch):
    wrap(patch, FSDPModule, "set_reshard_after_backward", lambda right, self, _yes: right(self, False))


fault(OPTIMIZER, "loss of step 1", STALE)(stays_gathered)


@fault(GRADIENTS, "loss of step 1", STALE)
def stays_gathered_with_gradients_divided(patch):
    stays_gathered(patch)


@fault(OFFLOADED, "loss of step 1", STALE)
def the_offloaded_update_does_not_come_back(patch):
    def wrong(right, self, *args):
        before = [block.local.clone() for block in self.blocks]
        right(self, *args)
        for block, value in zip(self.blocks, before, strict=True):
            block.local.copy_(value)

    wrap(patch, Optimizer, "update", wrong)


# Which rows, which samples, which inputs.


@fault(PARAMETERS, "loss of step 0")
def every_shard_begins_with_the_first_row(patch):
    wrap(patch, loop, "fill", lambda right, local, name, shape, offset, *rest: right(local, name, shape, [0] * len(offset), *rest))


@fault(COPIES, "loss of step 0")
def all_ranks_read_the_same_samples(patch):
    patch.setattr(Layout, "data_coordinate", lambda self, rank: 0)


@fault(RECOMPUTED, "gradient of decoder.blocks.0")
def recomputation_sees_other_inputs(patch):
    def wrong(block, _mode):
        right = block.forward

        def forward(x, rotary):
            again = torch._C._current_graph_task_id() != -1
            return right(x.flip(0) if again else x, rotary)

        block.forward = partial(checkpoint, forward, use_reentrant=False)

    patch.setattr(recompute, "wrap", wrong)


@fault(PARAMETERS, proofs=(TIED,))
def fsdp_gathers_a_tied_weight_in_two_units(patch):
    wrong = lambda model, of: [[m for name in group for m in parts.matching(model, name)] for group in of.ends] + [[b] for b in parts.blocks_of(model, of)]
    patch.setattr(shard, "units_of", wrong)


# The tensor axis.


@fault(CUT, "gradient of decoder.blocks.0.attention_norm.weight", "norm weights are not summed over the pieces of the sequence (tensor)")
def norm_weights_are_not_summed(patch):
    patch.setattr(spread, "sum_partial", lambda *_: None)


@fault(CUT, "gradient of decoder.blocks.0.attention_norm.weight", "norm weights are not summed over the pieces of the sequence (tensor)")
def norm_weights_are_used_as_if_whole(patch):
    local_norms(patch)


@fault(SHARDS_OF_CUTS, "gradient of decoder.blocks.0.attention_norm.weight", "norm weights are not summed over the pieces of the sequence (tensor)")
def norm_weights_are_used_as_if_whole_beside_shards(patch):
    local_norms(patch)


def local_norms(patch):
    """A replicated weight that meets a piece of the sequence as a plain tensor: its gradient is taken for the whole."""

    def wrong(right, self, x):
        if not isinstance(self.weight, DTensor):
            return right(self, x)
        scaled = nn.functional.rms_norm(x.to_local(), self.weight.shape, eps=self.eps) * self.weight.to_local()
        return DTensor.from_local(scaled, x.device_mesh, x.placements, run_check=False)

    wrap(patch, RMSNorm, "forward", wrong)


def look_up(patch, tokens_of):
    right = VocabularyEmbedding.look_up
    patch.setattr(VocabularyEmbedding, "look_up", staticmethod(lambda m, mesh, tokens: right(m, mesh, tokens_of(tokens, mesh.get_local_rank()))))


@fault(CUT, "loss of step 0", "wrong rows, positions or masks")
def vocabulary_offset_is_off_by_one(patch):
    look_up(patch, lambda tokens, rank: tokens - rank)


@fault(CUT, "loss of step 0", "wrong rows, positions or masks")
def pieces_of_the_sequence_are_swapped(patch):
    look_up(patch, lambda tokens, rank: tokens.roll(tokens.shape[1] // 2, dims=1))


@fault(CUT, "loss of step 0", "wrong rows, positions or masks")
def one_rank_sees_shifted_labels(patch):
    right = VocabularyHead.gather

    def wrong(mesh, module, inputs):
        hidden, labels = right(mesh, module, inputs)
        return hidden, labels.roll(mesh.get_local_rank(), dims=1)

    patch.setattr(VocabularyHead, "gather", staticmethod(wrong))


@fault(CUT, "gradient of", "not all there")
def the_heads_parts_of_a_gradient_are_not_summed(patch):
    right = VocabularyHead.gather

    def wrong(mesh, module, inputs):
        hidden, labels = right(mesh, module, inputs)
        return DTensor.from_local(hidden.to_local(), mesh, [Replicate()], run_check=False), labels

    patch.setattr(VocabularyHead, "gather", staticmethod(wrong))


@fault(CUT, "gradient of decoder.blocks.0.attention.out.weight", "not each once")
def row_cut_gradients_are_summed_over_tensor(patch):
    def also(_, parameters, mesh):
        for p in parameters:
            if isinstance(p.grad, DTensor) and p.grad.placements == (Shard(1),):
                dist.all_reduce(p.grad.to_local(), group=mesh.get_group())

    def wrong(right, parameters, mesh):
        whole = list(parameters)
        right(whole, mesh)
        also(None, whole, mesh)

    wrap(patch, spread, "sum_partial", wrong)


@fault(CUT, "gradient of decoder.embedding.weight", "the two uses of a tied weight, or the vocabulary's rows, are not put together", proofs=(TIED,))
def a_tied_weight_is_torn_by_the_cut(patch):
    patch.setattr(apply, "cut", lambda model, of, mesh: parallelize_module(model, mesh, dict(of.cuts()), src_data_rank=None))

    def alike(_, self, model, *__):
        self.names[id(model.head.weight)] = "decoder.embedding.weight"

    after(patch, Weights, "__init__", alike)


# Evaluation.

WEIGHED = "evaluation loss"


@fault(COPIES, WEIGHED, "training is right, evaluation does not weigh every token once")
def evaluation_counts_the_filler(patch):
    after(patch, Evaluation, "__init__", lambda _, self, *__: self.cuts.extend([self.filler] * (self.passes - len(self.cuts))))


@fault(COPIES, WEIGHED, "training is right, evaluation does not weigh every token once")
def evaluation_averages_the_ranks_means(patch):
    def mean(right, self, tensor, name="sum"):
        return right(self, tensor / tensor[1] if name == "evaluation sum" else tensor, name)

    wrap(patch, World, "sum", mean)


@fault(CUT, WEIGHED, "training is right, evaluation does not weigh every token once")
def evaluation_skips_what_is_not_a_whole_micro_batch(patch):
    after(patch, Evaluation, "__init__", lambda _, self, *__: self.cuts.pop())
