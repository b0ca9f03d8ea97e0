"""Keeps the flat tensors alive between steps. Expected check: memory."""
# ruff: noqa: F401

from meshwright_practice.labs.gradient_buckets.solution import attach_hooks, make_buckets

KEPT = {}


def finish(state):
    for number, bucket in enumerate(state):
        if bucket.work is not None:
            KEPT[number] = bucket.flat
        bucket.finish()
