"""Gives every rank the first samples of the batch. Expected check: ranks do not overlap."""
# ruff: noqa: F401

from meshwright_practice.labs.resumable_sampler.solution import next_batch as next_samples
from meshwright_practice.labs.resumable_sampler.solution import start


def next_batch(state, rank, ranks, batch_size):
    return next_samples(state, 0, ranks, batch_size)
