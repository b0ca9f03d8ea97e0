"""Reads every byte of a folder of weights once: its digest, and whether all numbers are finite. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from meshwright.base.config.reader import shorten
from meshwright.base.dtypes import TENSOR_BYTES
from meshwright.base.io import open_descriptor
from meshwright.core.checkpoint.unsharded import digest_of_lines, tensor_line
from meshwright.core.weights.folder import WeightFiles
from meshwright.core.weights.safetensors_file import StoredTensor
from meshwright.errors import ConfigError

BLOCK_BYTES = 1 << 18
"""Bytes that are read, hashed and checked at a time: few enough to remain in the CPU cache in between."""
THREADS = 4
EXPONENTS = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "bfloat16": 0xFF << 7, "float16": 0x1F << 10}
"""The bits of the exponent of a dtype. They are all ones in a NaN or an infinity, and in no other number."""


def tensor_digests(files: WeightFiles, progress: Callable[[], object] = lambda: None) -> dict[str, str]:
    """The xxh3-128 digest of every tensor. Raises ConfigError for a NaN or an infinity, and for a tensor that differs
    from the folder's own record of it.
    """
    names = list(files.tensors)
    with ThreadPoolExecutor(THREADS) as pool:
        digests = []
        for digest in pool.map(lambda name: digest_tensor(name, files.tensors[name]), names):
            digests.append(digest)
            progress()
    found = dict(zip(names, digests, strict=True))
    for name, recorded in files.recorded_digests.items():
        if found.get(name) != recorded:
            where = files.tensors[name].file if name in files.tensors else files.root
            raise ConfigError(
                f"{where}: tensor {shorten(name)} is {found.get(name, 'gone')}, and {shorten(recorded)} was exported",
                "try to export the checkpoint again",
            )
    return found


def folder_digest(files: WeightFiles, digests: dict[str, str]) -> str:
    """One digest of the names, dtypes, shapes and bytes of all tensors, however they are divided into files."""
    return digest_of_lines(
        tensor_line(name, tensor.dtype, tensor.shape, digests[name]) for name, tensor in files.tensors.items()
    )


def digest_tensor(name: str, tensor: StoredTensor) -> str:
    """The digest of one tensor."""
    state, block_bytes = xxhash.xxh3_128(), min(BLOCK_BYTES, tensor.bytes)
    view, end = memoryview(bytearray(block_bytes)), tensor.start + tensor.bytes
    check = FiniteCheck(tensor.dtype, block_bytes)
    descriptor = open_weights(tensor.file)
    try:
        for start in range(tensor.start, end, BLOCK_BYTES):
            block = view[: min(BLOCK_BYTES, end - start)]
            if os.preadv(descriptor, [block], start) != len(block):
                raise ConfigError(f"{tensor.file} ends at byte {start:,} of {end:,}", "try to copy it again")
            state.update(block)
            if not check.is_finite(block):
                raise ConfigError(
                    f"{tensor.file}: tensor {shorten(name)} has a NaN or an infinity", "expected finite weights"
                )
    except OSError as error:
        raise ConfigError(f"{tensor.file} cannot be read: {error.strerror}", "try to copy it again") from None
    finally:
        os.close(descriptor)
    return str(state.hexdigest())


def open_weights(file: Path) -> int:
    try:
        return open_descriptor(file, os.O_RDONLY, follow=True)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", "expected a safetensors file") from None


class FiniteCheck:
    """Looks for a NaN or an infinity in blocks of a dtype; numbers that are no floating-point numbers have none."""

    def __init__(self, dtype: str, max_bytes: int) -> None:
        self.exponent = EXPONENTS.get(dtype)
        self.bits = np.empty(max_bytes // TENSOR_BYTES[dtype], f"<u{TENSOR_BYTES[dtype]}")

    def is_finite(self, block: memoryview) -> bool:
        if self.exponent is None:
            return True
        bits = np.frombuffer(block, self.bits.dtype)
        # Without the sign, which is the highest bit, a number that is not finite is at least the bits of the exponent.
        doubled = np.left_shift(bits, 1, out=self.bits[: len(bits)])
        return bool(doubled.max(initial=0) < 2 * self.exponent)
