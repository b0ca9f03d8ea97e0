"""Keeps the flat tensors alive between steps. Expected check: memory."""

from meshwright.practice.labs.gradient_buckets.solution import attach_hooks, make_buckets  # noqa: F401

KEPT = {}


def finish(state):
    for number, bucket in enumerate(state):
        if bucket.work is not None:
            KEPT[number] = bucket.flat
        bucket.finish()
