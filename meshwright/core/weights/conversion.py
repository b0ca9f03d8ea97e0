"""Converts floating-point numbers between dtypes, by their bits. Torch-free."""

from __future__ import annotations

import numpy as np

from meshwright.core.weights.checkpoint_tensors import Bits
from meshwright.core.weights.content import EXPONENTS
from meshwright.errors import ConfigError

NUMPY = {"float64": "<f8", "float32": "<f4", "float16": "<f2"}


def convert_bits(bits: Bits, dtype: str, target: str, where: str) -> Bits:
    """The same numbers in another floating-point dtype, rounded to the nearest. Raises ConfigError if a finite number
    exceeds the range of the target.
    """
    if dtype == target:
        return bits
    values = (bits.astype("<u4") << 16).view("<f4") if dtype == "bfloat16" else bits.view(NUMPY[dtype])
    with np.errstate(over="ignore"):
        converted = to_bfloat16(values) if target == "bfloat16" else bits_of(values.astype(NUMPY[target]))
    if np.count_nonzero(is_finite(converted, target)) != np.count_nonzero(np.isfinite(values)):
        raise ConfigError(f"{where} has numbers above the range of {target}", "try another --dtype")
    return converted


def bits_of(values: Bits) -> Bits:
    return values.view(f"<u{values.itemsize}")


def to_bfloat16(values: Bits) -> Bits:
    """Rounds to the nearest bfloat16, ties to even: the upper half of a float32."""
    bits = bits_of(values.astype("<f4", copy=False))
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | np.uint32(0x40), rounded).astype("<u2")


def is_finite(bits: Bits, dtype: str) -> Bits:
    exponent = bits.dtype.type(EXPONENTS[dtype])
    finite: Bits = (bits & exponent) != exponent
    return finite
