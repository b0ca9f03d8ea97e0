"""Writes the rank into the state. Expected check: same state on all ranks."""
# ruff: noqa: F401

from meshwright_practice.labs.resumable_sampler.solution import next_batch as next_samples
from meshwright_practice.labs.resumable_sampler.solution import start


def next_batch(state, rank, ranks, batch_size):
    samples, after = next_samples(state, rank, ranks, batch_size)
    return samples, after | {"rank": rank}
