"""The norm of many tensors on CUDA: the Triton kernel against torch, bitwise the same every time."""

import pytest
import torch

from meshwright.core.kernels.gradient_norm import square_sum

pytestmark = pytest.mark.cuda
SIZES = [1, 1023, 8193, 5_000_001, 2**24]


def test_kernel_equals_torch_repeats_bitwise_and_never_waits():
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(size, device="cuda", generator=generator) for size in SIZES]
    tensors = [*made, *(tensor.bfloat16() for tensor in made), made[4].view(4096, 4096).mT]
    first = square_sum(tensors, torch.float32)  # builds its tables, and compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        repeated = [square_sum(tensors, torch.float32) for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
    torch.testing.assert_close(first, expected, rtol=1e-6, atol=0)
    assert all(torch.equal(first, other) for other in repeated)
