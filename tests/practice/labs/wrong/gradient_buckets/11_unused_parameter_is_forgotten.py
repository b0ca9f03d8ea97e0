"""Leaves out a bucket in which a gradient is missing. Expected check: unused parameter."""
# ruff: noqa: F401

from meshwright_practice.labs.gradient_buckets.solution import attach_hooks, make_buckets


def finish(state):
    for bucket in state:
        if bucket.work is not None:
            bucket.finish()
        bucket.missing = len(bucket.parameters)
