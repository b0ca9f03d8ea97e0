"""Every fault in a model, loss, dataset or plan of a user is found and named; correct ones are not."""

from __future__ import annotations

from functools import cache

import pytest
from torch import nn

from meshwright.base.config import LayoutConfig
from tests.prover import custom_model_faults, custom_plan_faults
from tests.prover.custom_cases import CustomCase, prove_cases
from tests.prover.custom_faults import CUSTOM_FAULTS, REPLICATE, SHARD, TENSOR
from tests.prover.custom_models import (
    TENSOR_SPEC,
    WIDTH,
    Classifier,
    Points,
    Texts,
    TokenModel,
    class_loss,
    pad,
    text_loss,
    token_loss,
)

PIPELINE = LayoutConfig(replicate=1, pipeline=2)
MODULES = (custom_model_faults, custom_plan_faults)


def clean_cases() -> dict[str, CustomCase]:
    """Correct models on the layouts of the faults, and on others of two ranks."""
    return {
        "replicate": CustomCase(TokenModel(), token_loss, REPLICATE),
        "replicate, tied": CustomCase(TokenModel(tie=True), token_loss, REPLICATE),
        "replicate, dropout": CustomCase(Classifier(nn.Dropout(0.2)), class_loss, REPLICATE, Points()),
        "replicate, synchronized": CustomCase(Classifier(nn.SyncBatchNorm(WIDTH)), class_loss, REPLICATE, Points()),
        "replicate, padded dicts": CustomCase(TokenModel(), text_loss, REPLICATE, Texts(), options={"collate": pad}),
        "shard": CustomCase(TokenModel(), token_loss, SHARD),
        "shard, tied": CustomCase(TokenModel(tie=True), token_loss, SHARD),
        "shard gradients": CustomCase(TokenModel(), token_loss, LayoutConfig(replicate=2, shard="gradients")),
        "shard optimizer, dropout": CustomCase(
            Classifier(nn.Dropout(0.2)), class_loss, LayoutConfig(replicate=2, shard="optimizer"), Points()
        ),
        "tensor": CustomCase(TokenModel(), token_loss, TENSOR, spec=TENSOR_SPEC),
        "tensor, tied": CustomCase(TokenModel(tie=True), token_loss, TENSOR, spec=TENSOR_SPEC),
        "pipeline": CustomCase(TokenModel(), token_loss, PIPELINE),
    }


@cache
def clean_results() -> dict[str, tuple[bool, str]]:
    return dict(zip(clean_cases(), prove_cases(list(clean_cases().values())), strict=True))


@cache
def results(layout: LayoutConfig) -> dict[str, tuple[bool, str]]:
    """The findings of all faults of a layout, from one launch."""
    names = [name for name, fault in CUSTOM_FAULTS.items() if fault.layout == layout]
    return dict(zip(names, prove_cases([CUSTOM_FAULTS[name].build() for name in names]), strict=True))


def test_there_are_more_than_thirty_faults():
    assert len(CUSTOM_FAULTS) > 30
    assert {fault.build.func.__module__ for fault in CUSTOM_FAULTS.values()} == {module.__name__ for module in MODULES}


@pytest.mark.parametrize("name", list(clean_cases()))
def test_correct_custom_model_equals_the_plain_module(name):
    passed, measured = clean_results()[name]
    assert passed, measured


@pytest.mark.parametrize("name", list(CUSTOM_FAULTS))
def test_fault_of_a_custom_model_is_found_and_named(name):
    fault = CUSTOM_FAULTS[name]
    passed, measured = results(fault.layout)[name]
    assert not passed, f"not found: {measured}"
    assert all(phrase in measured for phrase in fault.expected), measured
