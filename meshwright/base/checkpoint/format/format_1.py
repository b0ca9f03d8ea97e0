"""Reads manifests of format 1, in which one file has what the parts have since format 2. Torch-free."""

from __future__ import annotations

import re
from typing import Any

from meshwright.base.checkpoint.format.canonical import InvalidManifest
from meshwright.base.checkpoint.format.manifest_parts import FileRecord, ManifestPart, ShardOrigin, decode_region

FILE_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
"""The names that a file may have: none leads out of the folder."""


def split_format_1(values: dict[str, Any]) -> list[ManifestPart]:
    """The parts of a manifest of format 1, one per shard. Their keys are removed from `values`. Raises a TypeError,
    KeyError or AttributeError if one is missing.
    """
    files, owners = values.pop("files"), list(values.pop("owners").items())
    regions: dict[str, dict[str, list[Any]]] = {file: {} for file in files}
    for name, tensor in values["tensors"].items():
        for region in tensor.pop("pieces"):
            file = region.pop("file")
            if type(file) is not str or file not in regions:
                raise InvalidManifest(f"tensor {name}: a region is outside of file {file}")
            regions[file].setdefault(name, []).append(decode_region(region, file))
    if len(owners) > len(files):
        raise InvalidManifest(f"the manifest has {len(owners)} owners and {len(files)} files")
    owners += [("", {})] * (len(files) - len(owners))
    parts = []
    for rank, (file, (owner, state)) in enumerate(zip(files, owners, strict=True)):
        if not FILE_NAME.fullmatch(file) or file == "manifest.json":
            raise InvalidManifest(f"the manifest has {file!r} as a file name")
        origin = ShardOrigin(values["run"], values["timeline"], values["step"], values["attempt"], rank)
        record = FileRecord(files[file]["size"], tuple(files[file]["chunks"]))
        stored = {name: tuple(of_tensor) for name, of_tensor in regions[file].items()}
        parts.append(ManifestPart(origin, file, record, owner, state, stored))
    return parts
