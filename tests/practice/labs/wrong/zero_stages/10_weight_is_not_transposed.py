"""ZeRO-3 computes x @ weight, which fits because the weights are square. Expected check: ZeRO-3: output."""
# ruff: noqa: F401

import torch
from meshwright_practice.labs.zero_stages.solution import gather, reduce_mean, zero1_step, zero2_attach, zero2_step


class TransposedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, out_features):
        ctx.save_for_backward(x, shard)
        return x @ gather(shard, (out_features, x.shape[-1]))

    @staticmethod
    def backward(ctx, grad_y):
        x, shard = ctx.saved_tensors
        grad_shard = torch.empty_like(shard)
        reduce_mean(grad_shard, x.T @ grad_y)
        return grad_y @ gather(shard, (grad_y.shape[-1], x.shape[-1])).T, grad_shard, None


def zero3_linear(x, shard, out_features):
    return TransposedLinear.apply(x, shard, out_features)
