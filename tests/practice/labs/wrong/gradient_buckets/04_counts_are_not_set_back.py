"""Does not set the counts back, so that the second backward reduces nothing. Expected check: second step."""
# ruff: noqa: F401

from meshwright_practice.labs.gradient_buckets.solution import attach_hooks, make_buckets


def finish(state):
    for bucket in state:
        if bucket.work is not None or bucket.missing > 0:
            bucket.finish()
            bucket.missing = 0
