"""Says whether Triton kernels run on a device; everything else in this package asks here."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch


@cache
def has_triton() -> bool:
    """Whether the package triton is installed. torch for CUDA brings it along; torch for CPU does not."""
    return importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of a device: on CUDA, and anywhere in Triton's interpreter, which the tests
    use.
    """
    return has_triton() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
