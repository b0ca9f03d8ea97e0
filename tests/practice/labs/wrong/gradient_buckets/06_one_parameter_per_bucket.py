"""Reduces every parameter by itself and ignores the size of buckets. Expected check: buckets."""

from meshwright.practice.labs.gradient_buckets.solution import attach_hooks, finish  # noqa: F401


def make_buckets(parameters, bucket_bytes):
    return [[parameter] for parameter in reversed(parameters)]
