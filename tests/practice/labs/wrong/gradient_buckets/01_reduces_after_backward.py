"""Starts every all-reduce in finish, when backward has ended. Expected check: overlap."""

from meshwright.practice.labs.gradient_buckets.solution import ReducedBucket, finish, make_buckets  # noqa: F401


def attach_hooks(buckets):
    return [ReducedBucket(parameters, len(parameters)) for parameters in buckets]
