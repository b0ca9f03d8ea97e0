"""The registry of faults that are seeded into models, losses, data and plans of users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from meshwright.base.config import LayoutConfig
from tests.prover.custom_cases import CustomCase
from tests.prover.custom_models import Classifier, Points, TokenModel, class_loss, token_loss

REPLICATE = LayoutConfig(replicate=2)
SHARD = LayoutConfig(replicate=2, shard="parameters")
TENSOR = LayoutConfig(replicate=1, tensor=2)

FORWARD = "the forward pass or the loss depends on the rank or on the number of ranks"
BATCH_LOSS = "the loss depends on the number or the order of the samples in the batch"
STATE = "the forward pass keeps state between calls, or draws from a generator of its own"
TENSOR_FORWARD = "a row of tp_plan is wrong, or a reduction over the tensor axis is missing or made twice"


@dataclass(frozen=True)
class CustomFault:
    layout: LayoutConfig
    build: Callable[[], CustomCase]
    expected: tuple[str, ...]
    """What the finding must contain."""


CUSTOM_FAULTS: dict[str, CustomFault] = {}
"""Every fault, by its name."""


def custom_fault(layout: LayoutConfig, *expected: str) -> Callable:
    """Registers the decorated function, which builds a case, as a fault."""

    def register(build: Callable[[LayoutConfig], CustomCase]) -> Callable:
        name = build.__name__.replace("_", " ")
        assert name not in CUSTOM_FAULTS
        CUSTOM_FAULTS[name] = CustomFault(layout, partial(build, layout), expected)
        return build

    return register


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def classifier(layout: LayoutConfig, module: type[Classifier] = Classifier, loss=class_loss, **fields) -> CustomCase:
    return CustomCase(module(), loss, layout, fields.pop("source", Points()), **fields)


def tokens(layout: LayoutConfig, module: type[TokenModel] = TokenModel, loss=token_loss, **fields) -> CustomCase:
    return CustomCase(module(), loss, layout, **fields)
