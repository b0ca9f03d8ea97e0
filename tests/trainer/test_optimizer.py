"""AdamW as torch has it, clipping folded in, and schedules that end where they say."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from meshwright.config import OptimizerConfig, PrecisionConfig, ScheduleConfig
from meshwright.optim.adamw import AdamW
from meshwright.optim.schedule import learning_rate
from meshwright.trainer.precision import LossScale, Precision


def trained(implementation: str, clip: float, finite: bool = True, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = AdamW(dict(model.named_parameters()), OptimizerConfig(lr=0.1, clip=clip, implementation=implementation))
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
def test_an_update_is_torchs_adamw_with_clipping_and_decay_on_matrices_alone(implementation, clip, scale):
    found, right = trained(implementation, clip, scale=scale), expected(clip)
    # clip_grads_with_norm_ adds 1e-6 to the norm; we do not
    assert torch.allclose(found.weight, right.weight, rtol=1e-5)
    assert torch.allclose(found.bias, right.bias, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_gradient_that_is_not_finite_changes_nothing(implementation):
    found = trained(implementation, 1.0, finite=False)
    torch.manual_seed(0)
    assert torch.equal(found.weight, nn.Linear(5, 3).double().weight)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_a_schedule_warms_up_peaks_and_ends_at_its_floor(kind):
    schedule = ScheduleConfig(kind=kind, warmup=10, floor=0.1, decay=0.2)
    rates = [learning_rate(step, 100, 2.0, schedule) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert max(rates) == 2.0
    assert rates[-1] == pytest.approx(2.0 if kind == "constant" else 0.2)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    if kind == "wsd":
        assert rates[79] == 2.0 > rates[81]
    if kind == "linear":
        assert rates[55] - rates[56] == pytest.approx(rates[20] - rates[21])


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_schedule_of_few_steps_is_finite(steps):
    for kind in ("cosine", "linear", "wsd"):
        assert all(0 <= learning_rate(s, steps, 1.0, ScheduleConfig(kind=kind, warmup=2)) <= 1 for s in range(steps))


def test_the_loss_scale_halves_on_overflow_and_doubles_after_its_interval():
    scaler = LossScale(8.0, 2, torch.device("cpu"))
    seen = []
    for finite in (False, True, True, True, False):
        scaler.update(torch.tensor(finite))
        seen.append(float(scaler.scale))
    assert seen == [4.0, 4.0, 8.0, 8.0, 4.0]


def test_weights_stay_wide():
    cpu = torch.device("cpu")
    assert {c: Precision(PrecisionConfig(compute=c), cpu).weights for c in ("fp32", "bf16", "fp16", "fp64")} == {
        "fp32": torch.float32,
        "bf16": torch.float32,
        "fp16": torch.float32,
        "fp64": torch.float64,
    }
