"""The registry of faults that are seeded into the code of a user's config, and the configs that they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.prover.traced_cases import FLOAT64

MODEL = (
    "--model.width=16",
    "--model.heads=4",
    "--model.kv_heads=2",
    "--model.ffn=18",
    "--model.vocab=26",
    "--batch.micro=2",
)
ONE_RANK = (*MODEL, "--layout.replicate=1", "--batch.global=4")
REPLICATE = (*MODEL, "--layout.replicate=2", "--batch.global=8")
SHARD_PARAMETERS = (*REPLICATE, "--layout.shard=parameters")
EXPERTS = (
    *ONE_RANK,
    "--model.experts=4",
    "--model.experts_shared=1",
    "--model.ffn=10",
    "--model.router_aux_loss=0.1",
)

FORMULA = "forward and backward are wrong on a single rank: a formula of the model"
INCOMPLETE = "gradients of some ranks or micro-batches are missing or counted twice"
UPDATE = "gradients and norm are correct, the update is not: "
EVALUATION = "training is correct, but evaluation does not count every token of the held-out samples exactly once"


@dataclass(frozen=True)
class UserFault:
    options: tuple[str, ...]
    """The options of a user whose run the fault changes."""
    expected: tuple[str, ...]
    """What the measurement of every proof run that finds it must contain."""
    runs: tuple[str, ...]
    """The proof runs that find it."""
    inject: Callable[[pytest.MonkeyPatch], None]


USER_FAULTS: dict[str, UserFault] = {}
"""Every fault, by its name."""


def user_fault(options: tuple[str, ...], *expected: str, runs: tuple[str, ...] = (FLOAT64,)) -> Callable:
    """Registers the decorated function as a fault of a config."""

    def register(inject: Callable) -> Callable:
        name = inject.__name__.replace("_", " ")
        assert name not in USER_FAULTS
        USER_FAULTS[name] = UserFault(options, expected, runs, inject)
        return inject

    return register
