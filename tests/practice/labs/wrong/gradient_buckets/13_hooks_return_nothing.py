"""Registers the hooks and forgets to return the state. Expected check: 2 ranks return."""
# ruff: noqa: F401

from meshwright_practice.labs.gradient_buckets.solution import attach_hooks as attach
from meshwright_practice.labs.gradient_buckets.solution import finish, make_buckets


def attach_hooks(buckets):
    attach(buckets)
