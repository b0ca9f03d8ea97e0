"""Reads and writes the headers of safetensors files, which are untrusted. Torch-free.

A file is eight bytes with the length of its header, the header as JSON (name -> dtype, shape and byte range), and the
tensors one after the other. The tensors themselves are read by the safetensors library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from meshwright.base.config.reader import format_value, shorten
from meshwright.base.dtypes import TENSOR_BYTES
from meshwright.base.io import open_regular_file, parse_json
from meshwright.errors import ConfigError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20
"""Size limit of a header: a tensor takes about a hundred bytes of it."""
MAX_DIMENSIONS = 16
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The dtype of a header -> the name of the dtype in torch."""
STORED_NAMES = {torch_name: stored for stored, torch_name in DTYPES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file."""

    file: Path
    dtype: str
    """the name of its torch dtype"""
    shape: tuple[int, ...]
    start: int
    """the offset of its first byte in the file"""

    @property
    def bytes(self) -> int:
        return prod(self.shape) * TENSOR_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def invalid_file(file: Path, found: str) -> ConfigError:
    return ConfigError(f"{file} is not a valid safetensors file: {found}", "try to copy or to download it again")


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, also through a link. Raises ConfigError unless they fill the file, without holes."""
    try:
        with open_regular_file(file, follow=True) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
                raise invalid_file(file, f"it has {size:,} bytes, and its header would have {length:,}")
            if length > MAX_HEADER_BYTES:
                raise invalid_file(file, f"its header has {length:,} bytes, more than {MAX_HEADER_BYTES:,}")
            content = opened.read(length)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", "expected a safetensors file") from None
    tree = parse_json(content, f"the header of {file}", "a safetensors file", unique_keys=True)
    if not isinstance(tree, dict):
        raise invalid_file(file, "its header is not a JSON object")
    data_start, tensors = LENGTH_BYTES + length, {}
    for name, entry in tree.items():
        if name != "__metadata__":
            tensors[name] = parse_entry(file, name, entry, data_start)
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.bytes)):
        if tensor.start != end:
            raise invalid_file(file, f"its tensors overlap or leave a hole at byte {end:,}")
        end += tensor.bytes
    if end != size:
        raise invalid_file(file, f"it has {size:,} bytes, and its header describes {end:,}")
    return tensors


def parse_entry(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    """One tensor of an untrusted header."""
    shown = shorten(name)
    if not name.isprintable():
        raise invalid_file(file, f"it has a tensor with the name {name[:40]!r}")
    if not isinstance(entry, Mapping) or not is_sizes(entry.get("shape")) or not is_sizes(entry.get("data_offsets")):
        raise invalid_file(file, f"the entry of {shown} is {format_value(entry)}")
    if entry.get("dtype") not in DTYPES:
        raise ConfigError(
            f"{file}: tensor {shown} has dtype {format_value(entry.get('dtype'))}",
            f"expected one of {', '.join(DTYPES)}",
        )
    tensor = StoredTensor(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), data_start + entry["data_offsets"][0])
    offsets = entry["data_offsets"]
    if len(offsets) != 2 or len(tensor.shape) > MAX_DIMENSIONS or offsets[1] - offsets[0] != tensor.bytes:
        raise invalid_file(file, f"tensor {shown} of {tensor} has the byte range {format_value(offsets)}")
    return tensor


def is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 62 for size in value)


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The first bytes of a file of (name, dtype, shape); the tensors follow in this order."""
    tree: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + prod(shape) * TENSOR_BYTES[dtype]
        tree[name] = {"dtype": STORED_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    content = json.dumps(tree, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # tensors begin at a multiple of eight, so that a memory map is aligned
    return len(content).to_bytes(LENGTH_BYTES, "little") + content
