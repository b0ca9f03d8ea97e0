"""Stores the order of the epoch in the state. Expected check: size of the state."""
# ruff: noqa: F401

from meshwright_practice.labs.resumable_sampler.solution import next_batch as next_samples
from meshwright_practice.labs.resumable_sampler.solution import sample_order, start


def next_batch(state, rank, ranks, batch_size):
    samples, after = next_samples(state, rank, ranks, batch_size)
    epoch = after["position"] // state["length"]
    return samples, after | {"order": sample_order(state["seed"], epoch, state["length"])}
