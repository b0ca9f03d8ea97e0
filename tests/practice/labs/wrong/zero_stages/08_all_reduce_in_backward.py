"""ZeRO-3 all-reduces the gradient of the weight and takes its chunk. Expected check: ZeRO-3: bytes."""
# ruff: noqa: F401

import torch
import torch.distributed as dist
from meshwright_practice.labs.zero_stages.solution import gather, own_chunk, zero1_step, zero2_attach, zero2_step


class ReducedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, out_features):
        ctx.save_for_backward(x, shard)
        return x @ gather(shard, (out_features, x.shape[-1])).T

    @staticmethod
    def backward(ctx, grad_y):
        x, shard = ctx.saved_tensors
        gradient = grad_y.T @ x
        dist.all_reduce(gradient)
        grad_shard = own_chunk(gradient) / dist.get_world_size()
        return grad_y @ gather(shard, (grad_y.shape[-1], x.shape[-1])), grad_shard, None


def zero3_linear(x, shard, out_features):
    return ReducedLinear.apply(x, shard, out_features)
