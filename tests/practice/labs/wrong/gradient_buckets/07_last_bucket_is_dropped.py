"""Returns only the buckets that are full. Expected check: buckets."""
# ruff: noqa: F401

from meshwright_practice.labs.gradient_buckets.solution import attach_hooks, finish


def make_buckets(parameters, bucket_bytes):
    buckets, current, size = [], [], 0
    for parameter in reversed(parameters):
        if current and size + parameter.nbytes > bucket_bytes:
            buckets.append(current)
            current, size = [], 0
        current.append(parameter)
        size += parameter.nbytes
    return buckets
