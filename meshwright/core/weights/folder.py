"""A folder of weights as somebody else wrote it: its safetensors files, index and config.json. Torch-free.

The folder is untrusted. Everything that its headers say is checked before any tensor is read: an index names files of
the folder alone, every tensor is in exactly one file, and no file is a symbolic link to somewhere else.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.base.config.reader import format_value, shorten
from meshwright.base.io import file_inside, read_json
from meshwright.base.models.config_fields import ConfigFields, read_config_file
from meshwright.core.weights.safetensors_file import StoredTensor, read_header
from meshwright.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
RECORD_FILE = "meshwright.json"
"""What an export says about itself: its checkpoint, and the digest of every tensor."""
FILE_NAME = re.compile(r"[\w-][\w.-]*\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CONVERT = "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a folder by their stored names."""

    root: Path

    @classmethod
    def open(cls, path: Path) -> WeightFiles:
        """Opens a folder and reads all of its headers."""
        if path.suffix in PICKLES and path.is_file():
            raise pickle_error(path)
        try:
            root = path.resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise ConfigError(f"{path} cannot be read: no such folder", "expected a folder with safetensors") from None
        if not root.is_dir():
            raise ConfigError(f"{path} is not a folder", f"expected a folder with {SINGLE_FILE} or {INDEX_FILE}")
        files = cls(root)
        assert files.tensors is not None
        return files

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Stored name -> the tensor."""
        has_index, has_single = (os.path.lexists(self.root / name) for name in (INDEX_FILE, SINGLE_FILE))
        if has_index and has_single:
            raise ConfigError(f"{self.root} has both {INDEX_FILE} and {SINGLE_FILE}", "expected one of the two")
        if has_single:
            return read_header(file_inside(self.root, SINGLE_FILE))
        if has_index:
            return self._read_index()
        pickles = sorted(name for name in os.listdir(self.root) if name.endswith(PICKLES))
        if pickles:
            raise pickle_error(self.root / pickles[0])
        raise ConfigError(f"{self.root} has no safetensors", f"expected {SINGLE_FILE}, or {INDEX_FILE} and its files")

    def _read_index(self) -> dict[str, StoredTensor]:
        """The tensors of a sharded folder; the index and the headers must agree."""
        index = file_inside(self.root, INDEX_FILE)
        tree = read_json(index, "the index of a folder of safetensors")
        weight_map = tree.get("weight_map") if isinstance(tree, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index} has no weight_map", "expected an object of tensor names and file names")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
                raise ConfigError(
                    f"{index}: tensor {shorten(name)} is in {format_value(file)}", "expected a file of the same folder"
                )
        tensors: dict[str, StoredTensor] = {}
        for file in sorted(set(weight_map.values())):
            for name, tensor in read_header(file_inside(self.root, file)).items():
                if name in tensors:
                    raise ConfigError(
                        f"tensor {shorten(name)} is in {tensors[name].file.name} and in {self.root / file}",
                        "expected every tensor in one file",
                    )
                if weight_map.get(name) != file:
                    raise ConfigError(
                        f"{self.root / file} has tensor {shorten(name)}, which the index places in "
                        f"{format_value(weight_map.get(name))}",
                        "expected an index that lists every tensor of its files",
                    )
                tensors[name] = tensor
        if missing := sorted(weight_map.keys() - tensors.keys()):
            file = self.root / weight_map[missing[0]]
            raise ConfigError(
                f"{file} lacks tensor {shorten(missing[0])}, which the index places there",
                "try to copy or to download the folder again",
            )
        return tensors

    @property
    def has_config(self) -> bool:
        return os.path.lexists(self.root / CONFIG_FILE)

    def config_fields(self) -> ConfigFields:
        """The untrusted config.json."""
        file = file_inside(self.root, CONFIG_FILE)
        return ConfigFields.of(read_config_file(file), str(file))

    @cached_property
    def recorded_digests(self) -> dict[str, str]:
        """The digest of every tensor, as the export that wrote the folder recorded it; empty for other folders."""
        file = self.root / RECORD_FILE
        if not os.path.lexists(file):
            return {}
        record: Any = read_json(file, "a record that meshwright checkpoint export wrote")
        digests = record.get("tensors") if isinstance(record, dict) else None
        if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
            raise ConfigError(f"{file} has no digests of tensors", "try to export the checkpoint again")
        return digests


def pickle_error(file: Path) -> ConfigError:
    return ConfigError(
        f"{file} is a pickle, which can run any code when it is loaded",
        f"try to convert it to safetensors where you trust it: {CONVERT}",
    )
