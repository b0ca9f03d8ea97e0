"""The update equals torch's AdamW with clipping, and a gradient that is not finite changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright.base.config import OptimizerConfig
from meshwright.core.optim.build import build_optimizer


def trained(implementation: str, clip: float, finite: bool = True, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = build_optimizer(
        dict(model.named_parameters()), OptimizerConfig(lr=0.1, clip=clip, implementation=implementation)
    )
    for step in range(4):
        for p in model.parameters():
            p.grad = scale * torch.full_like(p, 0.5 + step)
        norm = optimizer.gradient_norm() / scale
        optimizer.update(0.1, norm, torch.tensor(scale), torch.tensor(finite))
        optimizer.zero_grad()
    return model


def expected(clip: float) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    for step in range(4):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5 + step)
        if clip:
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            torch.nn.utils.clip_grads_with_norm_(list(model.parameters()), clip, norm)
        adamw.step()
    return model


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("clip", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_update_equals_torch_adamw_with_clipping_and_weight_decay_on_matrices_only(implementation, clip, scale):
    actual, reference = trained(implementation, clip, scale=scale), expected(clip)
    # clip_grads_with_norm_ adds 1e-6 to the norm; we do not
    assert torch.allclose(actual.weight, reference.weight, rtol=1e-5)
    assert torch.allclose(actual.bias, reference.bias, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_nonfinite_gradient_changes_nothing(implementation):
    actual = trained(implementation, 1.0, finite=False)
    torch.manual_seed(0)
    assert torch.equal(actual.weight, nn.Linear(5, 3).double().weight)
