"""Seeded faults: each patches one line of the training path with a bug that systems in use have had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from meshwright.core.parallel.local_shard import local_shard
from meshwright.core.parallel.world import PendingAllReduce, World
from tests.prover.traced_cases import FLOAT64

MODEL = (
    "--model.layers=1",
    "--model.width=16",
    "--model.heads=2",
    "--model.kv_heads=2",
    "--model.ffn=18",
    "--model.vocab=26",
    "--steps=3",
    "--batch.micro=2",
    "--optimizer.eps=1e-4",
    "--optimizer.clip=0.1",
)
"""A small model whose gradients are clipped in every step, and whose updates depend on the scale of the gradient."""
ONE_REPLICA = ("--layout.replicate=1", "--batch.global=6")
REPLICATE = ("--layout.replicate=2", "--batch.global=12")
TIED = ("--model.tie=true",)
SHARD_OPTIMIZER = (*REPLICATE, "--layout.shard=optimizer")
SHARD_GRADIENTS = (*REPLICATE, "--layout.shard=gradients")
SHARD_PARAMETERS = (*REPLICATE, "--layout.shard=parameters")
HYBRID_SHARD = (*SHARD_PARAMETERS, "--layout.shard_degree=2", "--batch.global=8")

INCOMPLETE = "gradients of some ranks or micro-batches are missing or counted twice"
TOKEN_COUNT = "token count of step 0"
WRONG_BELOW = "and wrong below: a bucket, activation checkpointing or a reduction over the tensor axis"
TIED_WEIGHT = "the gradients of the two uses of a tied weight, or of the vocabulary shards, are not combined"
RANKS_MISSING = "the contribution of some ranks is missing"
COUNTED_TWICE = "replicated weights are counted more than once"
UPDATE = "gradients and norm are correct, the update is not: "
LOCAL_NORM = "every rank clips by the norm of its own shards"
STALE = "stale parameters: the update did not reach the unsharded parameters"
EVALUATION = "training is correct, but evaluation does not count every token of the held-out samples exactly once"


@dataclass(frozen=True)
class SeededFault:
    layout: tuple[str, ...]
    expected: tuple[str, ...]
    """What the measurement of every failed claim must contain."""
    runs: tuple[str, ...]
    """The proof runs that are compared; the fault must be found in all of them."""
    inject: Callable[[pytest.MonkeyPatch], None]


FAULTS: dict[str, SeededFault] = {}
"""Every seeded fault, by its name."""


def fault(layout: tuple[str, ...], *expected: str, runs: tuple[str, ...] = (FLOAT64,)) -> Callable:
    """Registers the decorated function as a fault of a layout."""

    def register(inject: Callable) -> Callable:
        name = inject.__name__.replace("_", " ")
        assert name not in FAULTS
        FAULTS[name] = SeededFault(layout, expected, runs, inject)
        return inject

    return register


def wrap(patch, owner, name, wrong):
    """Calls `wrong(right, *args)` instead of `right(*args)`."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **options: wrong(right, *args, **options))


def map_result(patch, owner, name, then):
    """Returns `then(result, *args)` instead of the result."""
    wrap(patch, owner, name, lambda right, *args, **options: then(right(*args, **options), *args))


def after_init(patch, owner, then):
    """Calls `then(self, *args)` after the constructor."""

    def wrong(right, self, *args, **options):
        right(self, *args, **options)
        then(self, *args)

    wrap(patch, owner, "__init__", wrong)


def replace_all_reduce(patch, name, wrong):
    """Calls `wrong(world, right, tensor)` instead of the all-reduce with this name."""

    def choose(right, world, tensor, called="sum"):
        return (
            wrong(world, partial(right, world, name=called), tensor) if called == name else right(world, tensor, called)
        )

    wrap(patch, World, "all_reduce", choose)


def skip_all_reduce(world, _right, tensor):
    return PendingAllReduce(tensor, None, world.heartbeat)


def initialize_both_ends_alike(_result, weights, _module):
    """Gives the separated head the values of the embedding, which it should share."""
    weights.fill_shard(local_shard(weights.model.head.weight), "decoder.embedding.weight")
