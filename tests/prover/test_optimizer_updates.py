"""The check of the optimizer passes for all settings, and finds faults that the gradients of proof runs do not show."""

from __future__ import annotations

import pytest
import torch

from meshwright.core.optim.interface import Optimizer
from meshwright.prover.optimizer_updates import check_optimizer
from tests.kit.small_run import load_cpu_config
from tests.prover.seeded_faults import after_init, wrap


def check(*options: str):
    [claim] = check_optimizer(load_cpu_config(overrides=["--data.kind=synthetic", *options]))
    return claim


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--optimizer.clip=0",),
        ("--optimizer.implementation=foreach", "--optimizer.eps=1e-3", "--optimizer.weight_decay=0"),
        ("--optimizer.beta1=0", "--optimizer.beta2=0"),
        ("--optimizer.cpu_offload=true", "--optimizer.lr=0"),
        ("--optimizer.eps=1e-20", "--optimizer.clip=1e9"),
    ],
    ids=lambda options: " ".join(options) or "defaults",
)
def test_updates_follow_the_definition(options):
    claim = check(*options)
    assert claim.passed, claim.measured


def test_clip_of_zero_that_means_one_is_found(monkeypatch):
    after_init(monkeypatch, Optimizer, lambda self, *_: setattr(self, "clip", self.clip or 1.0))
    claim = check("--optimizer.clip=0", "--optimizer.eps=1e-3")
    assert not claim.passed
    assert "the definition does not give the matrix" in claim.measured


def test_large_gradients_that_are_not_clipped_are_found(monkeypatch):
    def wrong(right, self, lr, norm, *rest):
        right(self, lr, norm.clamp(max=1e3), *rest)

    wrap(monkeypatch, Optimizer, "update", wrong)
    claim = check()
    assert not claim.passed
    assert "gradients of norm" in claim.measured


def test_skipped_step_that_counts_is_found(monkeypatch):
    def wrong(right, self, lr, norm, scale, finite):
        right(self, lr, norm, scale, finite)
        if not bool(finite):
            for state in self.rules[0].optimizer.state.values():
                state["step"].add_(1)

    wrap(monkeypatch, Optimizer, "update", wrong)
    assert not check().passed


def test_moments_that_underflow_are_found(monkeypatch):
    def wrong(right, self, *rest):
        right(self, *rest)
        for state in self.rules[0].optimizer.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].to(torch.float16))

    wrap(monkeypatch, Optimizer, "update", wrong)
    assert not check().passed
