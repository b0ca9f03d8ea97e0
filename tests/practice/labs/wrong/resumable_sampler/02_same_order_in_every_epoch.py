"""Shuffles with the seed alone. Expected check: order changes with the epoch."""
# ruff: noqa: F401

from meshwright_practice.labs.resumable_sampler.solution import sample_order, start


def next_batch(state, rank, ranks, batch_size):
    order = sample_order(state["seed"], 0, state["length"])
    positions = range(state["position"] + rank, state["position"] + batch_size, ranks)
    samples = [order[position % len(order)] for position in positions]
    return samples, state | {"position": state["position"] + batch_size}
