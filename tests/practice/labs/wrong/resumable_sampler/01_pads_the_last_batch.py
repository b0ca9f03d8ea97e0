"""Repeats samples to fill the last batch. Expected check: every sample once per epoch."""
# ruff: noqa: F401

from meshwright_practice.labs.resumable_sampler.solution import sample_order, start


def next_batch(state, rank, ranks, batch_size):
    length = state["length"]
    padded = -(-length // batch_size) * batch_size
    epoch, offset = divmod(state["position"], padded)
    order = sample_order(state["seed"], epoch, length)
    order = order + order[: padded - length]
    return order[offset + rank : offset + batch_size : ranks], state | {"position": state["position"] + batch_size}
