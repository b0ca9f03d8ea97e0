"""Tests of the dtype table against torch."""

from __future__ import annotations

from typing import get_args, get_type_hints

import torch

from meshwright.base.config import PrecisionConfig
from meshwright.base.dtypes import COMPUTE_BYTES, PRECISIONS, TENSOR_BYTES, TORCH_NAMES
from meshwright.base.hardware.cluster_file import Precision


def test_dtype_table_has_the_names_and_sizes_of_torch():
    for name, size in TENSOR_BYTES.items():
        assert getattr(torch, name).itemsize == size
    for name in PRECISIONS:
        assert isinstance(getattr(torch, TORCH_NAMES[name]), torch.dtype)


def test_declared_precisions_are_those_of_the_table():
    assert get_args(get_type_hints(PrecisionConfig)["compute"]) == ("auto", *COMPUTE_BYTES)
    assert set(get_args(Precision)) == set(PRECISIONS)
