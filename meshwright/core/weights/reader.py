"""Reads the parameters of a model from a folder of safetensors, slice by slice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.base.config import ModelConfig
from meshwright.base.config.reader import shorten
from meshwright.base.models.huggingface import StoredParameter
from meshwright.core.data.token_files import FileStatus
from meshwright.core.weights.folder import WeightFiles
from meshwright.core.weights.mapping import ExpectedTensor, NamedTensors, checked_digest, find_parameters
from meshwright.errors import ConfigError


class WeightFolder:
    """The weights of a model in a folder. Opening it checks every name, shape and dtype; `digest` reads every byte.

    A folder with a config.json of a family is read by the names of Hugging Face, any other by the names of the model.
    """

    def __init__(self, path: Path | str, model: ModelConfig | None = None, tensors: NamedTensors | None = None) -> None:
        """`model` is needed for a folder without a config.json; `tensors` are those of a custom model instead."""
        self.files = WeightFiles.open(Path(path))
        self.stored = find_parameters(self.files, model, tensors)
        self.status = {tensor.file: FileStatus.read(tensor.file) for tensor in self.files.tensors.values()}
        self._opened: dict[Path, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A process that receives the folder opens the files itself."""
        return self.__dict__ | {"_opened": {}}

    def __contains__(self, name: str) -> bool:
        return name in self.stored.parameters

    @cached_property
    def digest(self) -> str:
        """One digest of all tensors. Raises ConfigError for numbers that are not finite, and for damage that the record
        of an export shows.
        """
        return checked_digest(self.files, self.stored)

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The region of a parameter at `offset`, in the dtype that is stored; `name` is that of the model's spec."""
        parts = self.stored.parameters[name]
        if parts[0].expert is None:
            return self._read_part(parts[0], offset, shape)
        experts = {part.expert: part for part in parts}
        chosen = [experts[index] for index in range(offset[0], offset[0] + shape[0])]
        return torch.stack([self._read_part(part, offset[1:], shape[1:]) for part in chosen])

    def _read_part(self, part: StoredParameter, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        stored = self.files.tensors[part.stored]
        first_row = part.rows[0] if part.rows is not None else 0
        slices = [slice(start, start + size) for start, size in zip(offset, shape, strict=True)]
        if part.rows is not None:
            slices[0] = slice(slices[0].start + first_row, slices[0].stop + first_row)
        if part.transposed:
            slices.reverse()
        try:
            file = self._open(stored.file)
            value = file.get_slice(part.stored)[tuple(slices)] if slices else file.get_tensor(part.stored)
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{stored.file}: tensor {shorten(part.stored)} cannot be read: {error}", "try to copy it again"
            ) from None
        assert isinstance(value, Tensor)
        return value.T if part.transposed else value

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            self.raise_if_changed(file)
            self._opened[file] = safe_open(file, framework="pt")
        return self._opened[file]

    def raise_if_changed(self, file: Path) -> None:
        """Raises ConfigError if a file is not the one that was checked."""
        if FileStatus.read(file) != self.status[file]:
            raise ConfigError(f"{file} changed after it was checked", "try again when nothing writes to the folder")


def module_tensors(saved: Iterable[tuple[str, Tensor]]) -> NamedTensors:
    """The tensors of a module by all of their names; `saved` has a tied tensor several times."""
    names: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in saved:
        names.setdefault(id(tensor), ([], tensor))[0].append(name)
    return [
        (tuple(of_tensor), ExpectedTensor(tuple(tensor.shape), tensor.is_floating_point()))
        for of_tensor, tensor in names.values()
    ]
