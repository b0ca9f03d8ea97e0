"""Tests of the dtype table against torch."""

from __future__ import annotations

from typing import get_args

import torch

from meshwright.config import PrecisionConfig
from meshwright.config.dtypes import COMPUTE_BYTES, PRECISIONS, TENSOR_BYTES, TORCH_NAMES


def test_dtype_table_has_the_names_and_sizes_of_torch():
    for name, size in TENSOR_BYTES.items():
        assert getattr(torch, name).itemsize == size
    for name in PRECISIONS:
        assert isinstance(getattr(torch, TORCH_NAMES[name]), torch.dtype)


def test_precision_compute_accepts_every_compute_dtype_of_the_table():
    assert set(get_args(PrecisionConfig.__annotations__["compute"]) or COMPUTE_BYTES) == set(COMPUTE_BYTES)
    for name in COMPUTE_BYTES:
        assert PrecisionConfig(compute=name).compute == name
