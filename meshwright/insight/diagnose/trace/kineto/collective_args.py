"""What a profiler recorded about one collective: its name, message size and process group."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {
    "float": 4, "float32": 4, "int": 4, "int32": 4, "double": 8, "float64": 8, "long": 8, "long int": 8, "int64": 8,
    "half": 2, "c10::half": 2, "float16": 2, "bfloat16": 2, "c10::bfloat16": 2, "short": 2, "int16": 2,
    "byte": 1, "char": 1, "bool": 1, "uint8": 1, "int8": 1, "unsigned char": 1, "signed char": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
}  # fmt: skip
"""Name of a dtype in lower case, as torch spells it in "dtype" and in "Input type" -> bytes of an element."""
MAX_TEXT = 64


@dataclass(frozen=True)
class CollectiveArgs:
    """Arguments of one collective; an unknown one is empty or zero."""

    collective: str = ""
    message_bytes: int = 0
    """bytes that the rank contributes"""
    group: str = ""
    """name of the process group"""
    description: str = ""
    """what the program calls the process group, such as the axis of a mesh"""
    group_size: int = 0
    sequence: int = -1
    """number of the collective within its process group"""
    splits: tuple[int, ...] = ()
    """elements that are sent to each rank of an all-to-all"""


def parse_collective_args(text: bytes) -> CollectiveArgs:
    """Parses the `args` of an event; what is missing or not valid stays unknown."""
    try:
        args = json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return CollectiveArgs()
    return collective_args(args if isinstance(args, dict) else {})


def collective_args(args: dict[str, Any]) -> CollectiveArgs:
    """Reads the metadata that c10d adds to collectives or, without it, the shapes of the operator's inputs."""
    elements, dtype = integer(args.get("In msg nelems")), args.get("dtype")
    if elements <= 0:
        elements, dtype = input_elements(args)
    return CollectiveArgs(
        collective=words(args.get("Collective name")).lower(),
        message_bytes=max(elements, 0) * DTYPE_BYTES.get(words(dtype).lower(), 4),
        group=words(args.get("Process Group Name")),
        description=words(args.get("Process Group Description")),
        group_size=max(integer(args.get("Group size")), 0),
        sequence=integer(args.get("Seq"), -1),
        splits=split_sizes(args.get("In split size")),
    )


def input_elements(args: dict[str, Any]) -> tuple[int, Any]:
    """Returns the elements of the first input and its type, from "Input Dims" and "Input type"."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    shape = dims[0] if isinstance(dims, list) and dims else []
    if isinstance(shape, list) and shape and isinstance(shape[0], list):  # a list of tensors
        shape = shape[0]
    if not isinstance(shape, list) or not shape or not all(isinstance(size, int) and size >= 0 for size in shape):
        return 0, ""
    return min(math.prod(shape[:16]), 1 << 50), types[0] if isinstance(types, list) and types else ""


def split_sizes(value: Any) -> tuple[int, ...]:
    """Parses "In split size", a list or the text of one; a long list is abbreviated by torch and is not used."""
    if isinstance(value, str) and len(value) < 4096:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    is_valid = isinstance(value, list) and len(value) <= 4096 and all(is_size(size) for size in value)
    return tuple(value) if is_valid else ()


def is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 50


def words(value: Any) -> str:
    return value[:MAX_TEXT] if isinstance(value, str) else str(value)[:MAX_TEXT] if isinstance(value, int) else ""


def integer(value: Any, otherwise: int = 0) -> int:
    """An integer of at most 50 bits, also if it is written as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 15:
        value = int(value)
    return value if isinstance(value, int) and abs(value) < 1 << 50 else otherwise
