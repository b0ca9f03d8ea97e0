"""The step of ZeRO-2 does not gather the weights. Expected check: ZeRO-2: bytes."""
# ruff: noqa: F401

from meshwright_practice.labs.zero_stages.solution import own_chunk, update, zero1_step, zero2_attach, zero3_linear


def zero2_step(weights, gradient_shards, moments, lr):
    for weight, gradient, moment in zip(weights, gradient_shards, moments, strict=True):
        update(own_chunk(weight), gradient, moment, lr)
