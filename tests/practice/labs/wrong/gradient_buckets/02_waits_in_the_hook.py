"""Calls all_reduce without async_op, so that backward waits for every bucket. Expected check: asynchronous."""
# ruff: noqa: F401

from functools import partial

from meshwright_practice.labs.gradient_buckets.solution import ReducedBucket, finish, make_buckets, on_gradient


class BlockingBucket(ReducedBucket):
    def start(self):
        super().start()
        self.work.wait()


def attach_hooks(buckets):
    state = [BlockingBucket(parameters, len(parameters)) for parameters in buckets]
    for bucket in state:
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(partial(on_gradient, state, bucket))
    return state
