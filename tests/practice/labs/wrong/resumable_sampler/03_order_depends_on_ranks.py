"""Mixes the number of ranks into the order. Expected check: any number of ranks."""
# ruff: noqa: F401

from meshwright_practice.labs.resumable_sampler.solution import next_batch as next_samples
from meshwright_practice.labs.resumable_sampler.solution import start


def next_batch(state, rank, ranks, batch_size):
    samples, after = next_samples(state | {"seed": f"{state['seed']} of {ranks}"}, rank, ranks, batch_size)
    return samples, after | {"seed": state["seed"]}
