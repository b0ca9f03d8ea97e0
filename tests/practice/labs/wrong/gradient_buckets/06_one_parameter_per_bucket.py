"""Reduces every parameter by itself and ignores the size of buckets. Expected check: buckets."""
# ruff: noqa: F401

from meshwright_practice.labs.gradient_buckets.solution import attach_hooks, finish


def make_buckets(parameters, bucket_bytes):
    return [[parameter] for parameter in reversed(parameters)]
