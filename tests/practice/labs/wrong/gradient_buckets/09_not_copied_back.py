"""Waits for the flat tensors and forgets to copy them back into .grad. Expected check: gradients."""
# ruff: noqa: F401

import torch
from meshwright_practice.labs.gradient_buckets.solution import attach_hooks, make_buckets


def finish(state):
    for bucket in state:
        if bucket.work is not None:
            bucket.work.wait()
        bucket.missing, bucket.flat, bucket.work = len(bucket.parameters), torch.empty(0), None
