"""A source over an array of token ids, and token files as memory maps. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.source import Sample, content_digest, masked_tokens
from meshwright.errors import DataError

MAX_FULL_SCAN_BYTES = 256 << 20
"""Files up to this size are fingerprinted and validated completely; of larger files, the size and 64 blocks."""

SEPARATOR_BYTE = 0
"""The byte that ends every document of a byte-level corpus."""


class TokenSource:
    """One array of token ids, split into samples of `sequence` tokens. The label of a token is the next token."""

    def __init__(self, ids: NDArray[Any], sequence: int, vocab: int, name: str) -> None:
        self.ids, self.sequence, self.vocab, self.name = ids, sequence, vocab, name
        if len(ids) <= sequence:
            raise DataError(
                f"source {name} is empty: it has {len(ids)} token(s), and one sample needs {sequence + 1}",
                "try more data or a shorter data.sequence",
            )
        for block in scan_blocks(ids):
            if int(block.max()) >= vocab:
                raise DataError(
                    f"source {name} contains token id {int(block.max())}, but model.vocab = {vocab}",
                    "try a larger model.vocab, or data of the matching tokenizer",
                )

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.sequence

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.sequence
        tokens = self.ids[start : start + self.sequence + 1].astype(np.int64)
        if int(tokens.max()) >= self.vocab:
            raise ValueError(f"token id {int(tokens.max())} is out of range for model.vocab = {self.vocab}")
        return tokens[:-1], tokens[1:]

    def fingerprint(self) -> str:
        blocks = (block.tobytes() for block in scan_blocks(self.ids))
        return content_digest("tokens", self.ids.dtype, len(self.ids), self.sequence, *blocks)

    def masked_sample(self) -> Sample:
        return masked_tokens(self.sequence)


def map_file(file: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A file as a read-only memory map."""
    try:
        size = file.stat().st_size
        if size % dtype.itemsize:
            raise DataError(
                f"token file {file} has {size} bytes, which is not a multiple of {dtype.itemsize} ({dtype.name})",
                "try the other data.dtype, and check whether the file was truncated",
            )
        if size == 0:
            raise DataError(f"source {file} is empty: 0 bytes", "expected a file with data")
        return np.memmap(file, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"source {file} cannot be read: {error.strerror}", "try another data.path") from None


def scan_blocks(ids: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The complete array in blocks if it is small enough, else 64 evenly spaced blocks with both ends included."""
    block = 1 << 20
    if ids.nbytes <= MAX_FULL_SCAN_BYTES:
        starts = np.arange(0, len(ids), block)
    else:
        block //= 16
        starts = np.linspace(0, len(ids) - block, 64).astype(np.int64)
    for start in starts:
        yield ids[start : start + block]
