"""AdamW on master weights on CUDA: the Triton kernel against torch's fused AdamW."""

import pytest
import torch

from meshwright.core.kernels.adamw import AdamWSettings, MasterTensors

pytestmark = pytest.mark.cuda
SETTINGS = AdamWSettings(1e-3, (0.9, 0.95), 1e-8)
SIZES = [1, 1023, 2049, 5_000_001]


def tensors(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    masters = [torch.randn(size, device="cuda", generator=generator) for size in SIZES]
    gradients = [torch.randn(size, device="cuda", generator=generator).to(dtype) for size in SIZES]
    moments = [[torch.zeros_like(master) for master in masters] for _ in range(2)]
    steps, weights = torch.zeros(len(SIZES), device="cuda"), [master.bfloat16() for master in masters]
    return MasterTensors(masters, weights, *moments, steps, [1.0] * len(SIZES), [0.1] * len(SIZES)), gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_equals_torch_rounds_exactly_and_never_waits(dtype):
    made, gradients = tensors(dtype)
    expected = [master.clone().requires_grad_() for master in made.masters]
    optimizer = torch.optim.AdamW(expected, SETTINGS.lr, SETTINGS.betas, SETTINGS.eps, weight_decay=0.1, fused=True)
    divisor, finite = torch.tensor(2.5, device="cuda"), torch.tensor(True, device="cuda")
    made.update(gradients, SETTINGS, divisor, finite)  # builds its tables, and compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        made.update(gradients, SETTINGS, divisor, finite)
        made.update(gradients, SETTINGS, divisor * torch.nan, ~finite)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):
        for parameter, gradient in zip(expected, gradients, strict=True):
            parameter.grad = gradient.float() / 2.5
        optimizer.step()
    for master, weight, parameter in zip(made.masters, made.weights, expected, strict=True):
        torch.testing.assert_close(master, parameter.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(weight, master.bfloat16())
    assert made.steps.tolist() == [2.0] * len(SIZES)
