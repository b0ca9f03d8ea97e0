"""Starts every all-reduce in finish, when backward has ended. Expected check: overlap."""
# ruff: noqa: F401

from meshwright_practice.labs.gradient_buckets.solution import ReducedBucket, finish, make_buckets


def attach_hooks(buckets):
    return [ReducedBucket(parameters, len(parameters)) for parameters in buckets]
