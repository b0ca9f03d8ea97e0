"""Faults that depend on a setting of the user: precision, optimizer, data parallelism, activation checkpointing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from meshwright.core.kernels import float8
from meshwright.core.models.layers.experts import Router
from meshwright.core.optim import build
from meshwright.core.optim.interface import Optimizer
from meshwright.core.parallel.activation_memory import activation_checkpoint
from meshwright.core.parallel.data_parallel import ddp, fsdp
from meshwright.core.parallel.data_parallel.ddp import DDPModel
from meshwright.core.parallel.parallel_model import ParallelModel
from meshwright.core.trainer.expert_balancer import ExpertBalancer
from meshwright.core.trainer.precision import LossScale
from tests.prover.seeded_faults import after_init, wrap
from tests.prover.traced_cases import AS_CONFIGURED, FLOAT64, VARIATION
from tests.prover.user_faults import EXPERTS, ONE_RANK, REPLICATE, SHARD_PARAMETERS, UPDATE, user_fault

FP16 = (*ONE_RANK, "--precision.compute=fp16", "--optimizer.clip=0.5")
BF16 = (*ONE_RANK, "--precision.compute=bf16")
FLOAT8 = (*BF16, "--precision.float8=true", "--model.width=32", "--model.ffn=64")
BF16_EXPERTS = (*EXPERTS, "--precision.compute=bf16")
NO_CLIP = (*ONE_RANK, "--optimizer.clip=0", "--optimizer.eps=1e-3")
FOREACH = (*ONE_RANK, "--optimizer.implementation=foreach")
COMBINED = (*FOREACH, "--optimizer.cpu_offload=true", "--model.tie=true", "--activation_checkpoint.mode=selective")
NO_DECAY = (*ONE_RANK, "--optimizer.weight_decay=0", "--optimizer.beta1=0")
STATIC = (*REPLICATE, "--ddp.static_graph=true", "--batch.micro=4")
COMPRESSED = (*REPLICATE, "--ddp.comm_hook=bf16_compress")
KEPT = (*SHARD_PARAMETERS, "--fsdp.reshard_after_forward=false")
FIXED_BIASES = (*EXPERTS, "--model.router_bias_rate=0", "--model.router_aux_loss=0")


# Precision.


@user_fault(
    FP16, "update of", UPDATE + "the gradients are clipped by the norm of the scaled gradients", runs=(AS_CONFIGURED,)
)
def fp16_clips_by_the_norm_of_the_scaled_gradients(patch):
    def wrong(right, self, lr, norm, scale, finite):
        right(self, lr, norm * scale, scale, finite)

    wrap(patch, Optimizer, "update", wrong)


@user_fault(FP16, "loss scale", runs=(AS_CONFIGURED,))
def loss_scale_is_quartered_after_an_overflow(patch):
    def wrong(right, self, finite):
        right(self, finite)
        self.scale = torch.where(finite, self.scale, self.scale / 2)

    wrap(patch, LossScale, "update", wrong)


@user_fault(FP16, "loss scale", runs=(AS_CONFIGURED,))
def loss_scale_grows_one_step_early(patch):
    after_init(patch, LossScale, lambda self, *_: setattr(self, "interval", self.interval - 1))


@user_fault(FP16, "loss scale", runs=(AS_CONFIGURED,))
def overflow_does_not_reset_the_finite_steps(patch):
    def wrong(right, self, finite):
        before = self.finite_steps
        right(self, finite)
        self.finite_steps = torch.where(finite, self.finite_steps, before)

    wrap(patch, LossScale, "update", wrong)


@user_fault(BF16_EXPERTS, "step 0", "a router in lower precision", runs=(AS_CONFIGURED,))
def router_is_computed_in_bf16(patch):
    def wrong(self, x):
        scores = torch.nn.functional.linear(x.bfloat16(), self.weight.bfloat16()).float()
        chosen = (scores.detach() + self.bias).sort(dim=-1, descending=True, stable=True).indices[:, : self.active]
        return scores, chosen.contiguous(), scores.gather(1, chosen).softmax(dim=-1)

    patch.setattr(Router, "forward", wrong)


@user_fault(BF16, "gradient of", runs=(AS_CONFIGURED,))
def bf16_backward_lacks_one_micro_batch(patch):
    def wrong(right, self, micro_batches, hooks):
        scale, calls = hooks.scale_loss, [0]

        def scale_loss(losses):
            calls[0] += 1
            return scale(losses) * (calls[0] != 2)

        hooks.scale_loss = scale_loss
        return right(self, micro_batches, hooks)

    wrap(patch, ParallelModel, "forward_backward", wrong)


@user_fault(FLOAT8, "gradient of", runs=(AS_CONFIGURED,))
def float8_columns_have_the_scale_of_their_neighbour(patch):
    def wrong(right, x):
        rows, columns = right(x)
        return rows, float8.Float8(columns.values, columns.scale.roll(1, 0))

    wrap(patch, float8, "to_float8_both", wrong)


@user_fault(BF16, "update of", "the parameters are rounded to bfloat16", runs=(AS_CONFIGURED,))
def weights_are_bf16_between_steps(patch):
    def wrong(right, self, *rest):
        right(self, *rest)
        with torch.no_grad():
            for p in self.local_parameters:
                p.copy_(p.bfloat16())

    wrap(patch, Optimizer, "update", wrong)


# Optimizer.


@user_fault(NO_CLIP, "update of", UPDATE, "clipped to zero")
def clip_of_zero_clips_to_zero(patch):
    after_init(patch, Optimizer, lambda self, *_: setattr(self, "clip", self.clip or 1e-300))


@user_fault(COMBINED, "update of", "the betas are swapped")
def foreach_swaps_the_betas(patch):
    def wrong(self, *_):
        for group in self.rules[0].optimizer.param_groups:
            group["betas"] = group["betas"][::-1] if not self.rules[0].fused else group["betas"]

    after_init(patch, Optimizer, wrong)


@user_fault(FOREACH, "update of", UPDATE, "optimizer.eps", runs=(VARIATION,))
def foreach_has_the_default_epsilon(patch):
    def wrong(self, *_):
        for group in self.rules[0].optimizer.param_groups:
            group["eps"] = 1e-8

    after_init(patch, Optimizer, wrong)


@user_fault(NO_DECAY, "update of", UPDATE + "optimizer.weight_decay is 0, and its default 0.1 is used")
def weight_decay_of_zero_means_the_default(patch):
    def wrong(right, config, *args):
        return right(replace(config, weight_decay=config.weight_decay or 0.1), *args)

    wrap(patch, build, "parameter_settings", wrong)


@user_fault(NO_DECAY, "update of", UPDATE + "optimizer.beta1 is 0, and its default 0.9 is used")
def beta_of_zero_means_the_default(patch):
    def wrong(self, *_):
        for group in self.rules[0].optimizer.param_groups:
            group["betas"] = tuple(b or 0.9 for b in group["betas"])

    after_init(patch, Optimizer, wrong)


@user_fault(COMBINED, "update of", "the moments are rounded to bfloat16")
def moments_are_stored_in_bf16(patch):
    def wrong(right, self, *rest):
        right(self, *rest)
        for state in self.rules[0].optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].bfloat16())

    wrap(patch, Optimizer, "update", wrong)


@user_fault(COMBINED, "update of", UPDATE + "the gradient does not reach the optimizer")
def offloaded_update_reads_the_gradient_of_the_step_before(patch):
    def wrong(right, self):
        right(self)
        for p in self.local_parameters:
            stale = getattr(p, "stale", torch.zeros_like(p))
            p.stale, p.grad = p.grad.clone(), stale

    wrap(patch, Optimizer, "_attach_gradients", wrong)


@user_fault(COMBINED, "update of decoder.embedding.weight", UPDATE + "weight decay applies twice")
def tied_weight_is_decayed_twice(patch):
    def wrong(right, self, lr, *rest):
        with torch.no_grad():
            self.local_parameters[0].mul_(1 - lr * 0.1)
        right(self, lr, *rest)

    wrap(patch, Optimizer, "update", wrong)


# Data parallelism and activation checkpointing.


@user_fault(STATIC, "gradient of", "(factor 0.5): averaged over the replicate axis (2)")
def static_graph_has_no_comm_hook(patch):
    right = ddp.reduce_bucket

    def wrong(state, bucket):
        done = right(state, bucket)
        return done.then(lambda d: d.value().div_(2)) if state.ddp.static_graph else done

    patch.setattr(ddp, "reduce_bucket", wrong)


@user_fault(COMPRESSED, "gradient of", "averaged over the replicate axis (2)", runs=(AS_CONFIGURED,))
def compressed_gradients_are_averaged(patch):
    right = ddp.reduce_bucket

    def wrong(state, bucket):
        done = right(state, bucket)
        return done.then(lambda d: d.value().div_(2)) if state.compress_bf16 else done

    patch.setattr(ddp, "reduce_bucket", wrong)


@user_fault(REPLICATE, "gradient of", "rounded", runs=(FLOAT64, AS_CONFIGURED))
def gradients_are_compressed_without_the_setting(patch):
    after_init(patch, DDPModel, lambda self, *_: setattr(self, "compress_bf16", True))


@user_fault(COMBINED, "gradient of", "activation checkpointing")
def selective_recomputation_skips_a_norm(patch):
    def wrong(block, _mode):
        right = block.forward

        def forward(x, rotary):
            again = torch._C._current_graph_task_id() != -1  # inside backward
            return right(x * 1.5 if again else x, rotary)

        block.forward = partial(checkpoint, forward, use_reentrant=False)

    patch.setattr(activation_checkpoint, "checkpoint_block", wrong)


@user_fault(KEPT, "loss of step 1", "stale parameters")
def parameters_that_are_not_resharded_stay_after_the_update(patch):
    def wrong(right, self, last):
        wrapped = FSDPModule.set_reshard_after_backward
        if not self.config_reshards:
            patch.setattr(FSDPModule, "set_reshard_after_backward", lambda unit, _: wrapped(unit, False))
        return right(self, last)

    after_init(
        patch,
        fsdp.FSDPModel,
        lambda self, _m, _s, config, *_: setattr(self, "config_reshards", config.fsdp.reshard_after_forward),
    )
    wrap(patch, fsdp.FSDPModel, "micro_step", wrong)


# Experts.


@user_fault(FIXED_BIASES, "router.bias", "they change, and model.router_bias_rate is 0")
def router_bias_rate_of_zero_means_the_default(patch):
    after_init(patch, ExpertBalancer, lambda self, *_: setattr(self, "rate", self.rate or 0.001))


@user_fault(FIXED_BIASES, "gradient of", "balance loss")
def balance_loss_of_zero_means_the_default(patch):
    after_init(patch, ExpertBalancer, lambda self, *_: setattr(self, "weight", self.weight or 0.01))
