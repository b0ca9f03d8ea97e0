"""Writes an export as one file of torch.save, which `torch.load(..., weights_only=True)` reads."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from meshwright.core.weights.export import OutputTensor, TensorWriter

TORCH_FILE = "model.pt"


def write_torch_file(writer: TensorWriter, outputs: Sequence[OutputTensor]) -> str:
    """Writes every tensor to a file of its own, and then all of them through memory maps, so that the process does not
    have the model in memory.
    """
    raw = [f"{index}.raw" for index in range(len(outputs))]
    state = {}
    for file, output in zip(raw, outputs, strict=True):
        writer.write(file, [output], b"")
        dtype = getattr(torch, output.dtype)
        if not output.bytes:
            state[output.name] = torch.empty(output.shape, dtype=dtype)
            continue
        numbers = torch.from_file(str(writer.folder / file), shared=False, size=prod(output.shape), dtype=dtype)
        state[output.name] = numbers.reshape(output.shape)
    torch.save(state, writer.folder / TORCH_FILE)
    for file in raw:
        (writer.folder / file).unlink()
    return TORCH_FILE
