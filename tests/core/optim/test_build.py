"""An optimizer is built on every rank of a pipeline, whichever parameters its stages have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.base.config import OptimizerConfig
from meshwright.base.topology.layout import Layout
from meshwright.core.optim import build
from meshwright.core.optim.build import build_optimizer


@pytest.mark.parametrize(("kind", "groups"), [("muon", 1), ("adafactor", 1), ("adamw", 0)])
def test_rank_without_a_parameter_of_the_rule_creates_its_process_group(kind, groups, monkeypatch):
    created = []
    monkeypatch.setattr(build, "new_group", lambda layout, *axes: created.append(axes))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    build_optimizer({"blocks.0.norm": frozen}, OptimizerConfig(kind=kind), Layout(pipeline=2), blocks=("blocks.*",))
    assert len(created) == groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stage_without_a_trainable_parameter_has_a_gradient_norm(dtype):
    frozen = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
    optimizer = build_optimizer({"norm": frozen}, OptimizerConfig(), Layout(pipeline=2))
    norm = optimizer.gradient_norm()
    assert norm == 0
    assert norm.dtype == dtype
