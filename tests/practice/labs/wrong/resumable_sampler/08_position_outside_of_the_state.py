"""Keeps the position in the module and starts the epoch anew after a restart. Expected check: resume."""

from meshwright_practice.labs.resumable_sampler.solution import next_batch as next_samples

TAKEN = {}


def start(seed, length):
    TAKEN.clear()
    return {"seed": seed, "length": length}


def next_batch(state, rank, ranks, batch_size):
    position = TAKEN.get(rank, 0)
    TAKEN[rank] = position + batch_size
    samples, _ = next_samples(state | {"position": position}, rank, ranks, batch_size)
    return samples, state
