"""Starts a bucket when its first gradient is ready, while the others are missing. Expected check: gradients."""
# ruff: noqa: F401

from functools import partial

from meshwright_practice.labs.gradient_buckets.solution import ReducedBucket, finish, make_buckets


class HastyBucket(ReducedBucket):
    def on_gradient(self, _):
        if self.work is None:
            self.start()


def attach_hooks(buckets):
    state = [HastyBucket(parameters, len(parameters)) for parameters in buckets]
    for bucket in state:
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(partial(HastyBucket.on_gradient, bucket))
    return state
