"""Counts the samples of one rank, which mean something else on other ranks. Expected check: resume on other ranks."""
# ruff: noqa: F401

from meshwright_practice.labs.resumable_sampler.solution import next_batch as next_samples
from meshwright_practice.labs.resumable_sampler.solution import start


def next_batch(state, rank, ranks, batch_size):
    samples, _ = next_samples(state | {"position": state["position"] * ranks}, rank, ranks, batch_size)
    return samples, state | {"position": state["position"] + batch_size // ranks}
