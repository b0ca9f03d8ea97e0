"""Random tokens: on the device for the contenders, which load no data, and as a token file for Meshwright."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.shapes import Shape

BATCHES = 64
"""Different batches; a smaller pool would be memorized within a benchmark."""


def random_tokens(shape: Shape) -> np.ndarray[Any, np.dtype[Any]]:
    """Token ids of all batches, with one more per sequence for its last target."""
    dtype = np.uint16 if shape.vocab <= 1 << 16 else np.uint32
    size = (BATCHES, shape.batch, shape.sequence + 1)
    return np.random.default_rng(1234).integers(0, shape.vocab, size, dtype=dtype)


def write_token_file(shape: Shape, folder: Path) -> tuple[Path, str]:
    """Writes the tokens to a file for a source of kind `tokens`; returns it with the name of its dtype."""
    tokens = random_tokens(shape)
    path = folder / "tokens.bin"
    tokens.tofile(path)
    return path, tokens.dtype.name


class DeviceBatches:
    """Batches that lie on the device; `next` returns (tokens, targets)."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        tokens = torch.from_numpy(random_tokens(shape).astype(np.int64)).to(device)
        pairs = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]
        self.batches = cycle(pairs)

    def __next__(self) -> tuple[Tensor, Tensor]:
        return next(self.batches)


class TokenSamples:
    """The sequences as a map-style dataset for a transformers model, which shifts the labels itself."""

    def __init__(self, shape: Shape) -> None:
        self.tokens = random_tokens(shape).reshape(-1, shape.sequence + 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.tokens[index, :-1].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}
