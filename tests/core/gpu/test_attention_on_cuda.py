"""cuDNN's deterministic attention on CUDA equals torch's flash kernels, and itself bitwise."""

from __future__ import annotations

import pytest

from tests.core.gpu.cuda_steps import compare_attention

pytest.importorskip("cudnn")
pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("compiled", [False, True])
def test_deterministic_attention_equals_torch_and_repeats_bitwise(compiled):
    errors, repeats = compare_attention(compiled)
    assert max(errors) < 2**-7  # two bf16 kernels that sum in different orders
    assert repeats
