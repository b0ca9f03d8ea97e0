"""Each rank updates its own shard and does not gather the others. Expected check: ZeRO-1: weights."""
# ruff: noqa: F401

from meshwright_practice.labs.zero_stages.solution import (
    own_chunk,
    reduce_mean,
    update,
    zero2_attach,
    zero2_step,
    zero3_linear,
)


def zero1_step(weights, gradients, moments, lr):
    for weight, gradient, moment in zip(weights, gradients, moments, strict=True):
        shard = own_chunk(gradient).clone()
        reduce_mean(shard, gradient)
        update(own_chunk(weight), shard, moment, lr)
