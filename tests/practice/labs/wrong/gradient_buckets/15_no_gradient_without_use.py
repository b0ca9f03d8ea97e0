"""Writes no mean where this rank has no gradient, although another one has. Expected check: different layers."""
# ruff: noqa: F401

from meshwright_practice.labs.gradient_buckets.solution import attach_hooks, make_buckets
from meshwright_practice.labs.gradient_buckets.solution import finish as finish_all


def finish(state):
    parameters = [parameter for bucket in state for parameter in bucket.parameters]
    unused = [parameter for parameter in parameters if parameter.grad is None]
    finish_all(state)
    for parameter in unused:
        parameter.grad = None
