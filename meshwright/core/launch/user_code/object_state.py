"""Tells which attributes of a user's objects are set when they are built, and which change while they are used."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MAX_NUMEL = 1 << 16
"""Elements of a tensor whose values count; a larger one counts by its shape."""
MAX_SHOWN = 16
"""Elements of a tensor that are shown one by one."""
CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR")
ITEM_STORES = ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR")
MUTATORS = {"append", "appendleft", "extend", "insert", "update", "setdefault", "pop", "popitem", "clear", "add"}
"""Methods of containers that change them; those of tensors end with an underscore."""
RANDOM = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "normal",
    "normal_",
    "uniform_",
    "bernoulli",
}
"""Functions that fill a tensor with values that differ from process to process."""


def code_names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a code object and those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_names(constant)


def written_names(code: types.CodeType) -> set[str]:
    """The attributes and variables that a function changes: it assigns to them or to their items, or calls a method
    that changes them in place.
    """
    written: set[str] = set()
    found = list(dis.get_instructions(code))
    for index, instruction in enumerate(found):
        name, line = instruction.opname, line_of(instruction)
        if isinstance(instruction.argval, types.CodeType):
            written |= written_names(instruction.argval)
        elif name in STORES:
            written.add(instruction.argval)
        elif name in ITEM_STORES:
            written |= {other.argval for other in found if other.opname in LOADS and line_of(other) == line}
        elif name in LOADS and (instruction.argval in MUTATORS or is_in_place(instruction.argval)):
            while index and found[index - 1].opname in LOADS:
                index -= 1
                written.add(found[index].argval)
    return written


def line_of(instruction: dis.Instruction) -> int | None:
    return instruction.positions.lineno if instruction.positions is not None else None


def is_in_place(name: Any) -> bool:
    return isinstance(name, str) and name.endswith("_") and not name.startswith("_")


def state_names(methods: dict[str, types.FunctionType]) -> set[str]:
    """The attributes that the methods of a class change after construction. A method that only the constructor calls is
    part of it.
    """
    built = {name for key in CONSTRUCTORS if key in methods for name in code_names(methods[key].__code__)}
    later = {name: method for name, method in methods.items() if name not in CONSTRUCTORS}
    called_later = {name for method in later.values() for name in code_names(method.__code__)}
    used = [method for name, method in later.items() if name not in built - called_later]
    return set().union(*(written_names(method.__code__) for method in used))


def builds_random_values(methods: dict[str, types.FunctionType]) -> bool:
    """Whether the constructor of a class draws random numbers: its tensors then differ from process to process."""
    built = {name for key in CONSTRUCTORS if key in methods for name in code_names(methods[key].__code__)}
    called = [methods[name].__code__ for name in built & methods.keys()]
    return bool(RANDOM & (built | {name for code in called for name in code_names(code)}))


def tensor_text(tensor: Tensor, with_values: bool) -> str:
    """The shape and dtype of a tensor, and its values. They are rounded, because the last bits of a computed tensor
    differ between processors; many values are described by their norm and two projections.
    """
    shape = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    if not with_values or tensor.is_meta or tensor.layout != torch.strided or not 0 < tensor.numel() <= MAX_NUMEL:
        return shape
    values = tensor.detach().cpu().flatten()
    values = torch.view_as_real(values).flatten() if values.is_complex() else values
    numbers = torch.nan_to_num(values.double(), nan=0.5, posinf=2.0, neginf=-3.0)
    if len(numbers) <= MAX_SHOWN:
        return f"{shape} = {' '.join(f'{float(value):.5g}' for value in values)}"
    norm = float(numbers.norm())
    index = torch.arange(len(numbers), dtype=torch.float64)
    weights = torch.stack([torch.cos(index), (index + 1) / len(numbers)])
    projections = (weights @ numbers) / (weights.norm(dim=1) * norm if norm else 1.0)
    return f"{shape} = norm {norm:.4g}, {' '.join(f'{float(value) + 0.0:.4f}' for value in projections)}"
