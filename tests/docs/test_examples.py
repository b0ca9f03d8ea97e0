"""The examples of custom models train, stay short, and keep every contract on a hybrid layout."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import prove, train
from meshwright.base.config import LayoutConfig

EXAMPLES: dict[str, dict[str, str]] = {
    "resnet": {"model": "build", "loss": "loss", "source": "Stripes"},
    "encoder_classifier": {"model": "Classifier", "loss": "loss", "source": "Sentences", "collate": "collate"},
    "transformers_llama": {"model": "build", "source": "Counting"},
    "transformers_mixtral": {"model": "build", "source": "Counting"},
    "vision_transformer": {"model": "build", "loss": "loss", "source": "Stripes"},
    "two_towers": {"model": "TwoTowers", "loss": "loss", "source": "Pairs"},
}
"""Example -> the names of what it passes to `train`."""

HYBRIDS = {
    "resnet": LayoutConfig(replicate=2, shard="optimizer"),
    "encoder_classifier": LayoutConfig(replicate=2, shard="gradients"),
    "transformers_llama": LayoutConfig(replicate=2, shard="parameters", tensor=2),
    "transformers_mixtral": LayoutConfig(replicate=4, shard="parameters", expert=2),
    "vision_transformer": LayoutConfig(replicate=2, shard="optimizer", pipeline=2),
    "two_towers": LayoutConfig(replicate=2, shard="parameters"),
}


def arguments(example: str) -> dict[str, Any]:
    """What the example passes to `train`, with the model and the dataset built."""
    module = importlib.import_module(f"examples.{example}")
    torch.manual_seed(0)
    return {
        argument: getattr(module, name)() if argument in ("model", "source") else getattr(module, name)
        for argument, name in EXAMPLES[example].items()
    }


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_train(example, tmp_path):
    config = replace(importlib.import_module(f"examples.{example}").CONFIG, steps=2)
    result = train(config, run=tmp_path / "run", quiet=True, **arguments(example))
    assert result.steps == 2
    assert math.isfinite(result.loss)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_short(example):
    assert len((Path(__file__).parents[2] / "examples" / f"{example}.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize("example", [pytest.param(name, marks=pytest.mark.long) for name in EXAMPLES])
def test_examples_are_proven_on_a_hybrid(example):
    config = replace(importlib.import_module(f"examples.{example}").CONFIG, layout=HYBRIDS[example])
    certificate = prove(config, **arguments(example))
    assert certificate["passed"], certificate
