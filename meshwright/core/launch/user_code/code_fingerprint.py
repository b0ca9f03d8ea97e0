"""Fingerprints of a user's code: what runs, not how it is written, so that comments and formatting do not count.

A function counts by its bytecode, its defaults, the values that it closes over, and the functions, classes and
values of the user's modules that it refers to. A class counts by its methods and constants, and those of its bases. An
object counts by its attributes, except those that its methods change: caches, counters and running statistics.
Code of installed packages counts by the version of the package; checkpoints record the versions of torch and Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import dis
import enum
import functools
import hashlib
import importlib.metadata
import sys
import types
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.core.launch.user_code.object_state import (
    builds_random_values,
    code_names,
    state_names,
    tensor_text,
    written_names,
)
from meshwright.errors import is_user_file

CodeParts = dict[str, str]
"""What a piece of code consists of ("class project.Net", "function project.loss", "package timm") -> hash or value."""
Lines = Iterator[tuple[str, str]]
"""The (name, text) of a value and of the values inside it."""

MAX_VALUE = 200
"""Characters of a constant that a record keeps."""
MAX_LINES = 32
"""Values inside a value that a record lists; more are hashed."""
MAX_VALUES = 20_000
"""Values inside a value that are read."""
MAX_DEPTH = 8
"""Levels of values inside values that are read."""
UNCOUNTED_PACKAGES = {"torch", "builtins", "numpy", "meshwright", *sys.stdlib_module_names}
"""Packages whose versions a checkpoint records (`made_by`), or that do not change the numbers."""
GENERATED = ("__init__", "__repr__", "__eq__", "__hash__", "__replace__")
"""Methods of a dataclass that name all of its fields."""
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
MODULE_ATTRIBUTES = vars(nn.Module()).keys() - {"training"}
"""Attributes that torch gives every module."""


class CodeFingerprint:
    """Collects the parts of a user's code, following what functions and classes refer to."""

    def __init__(self) -> None:
        self.parts: CodeParts = {}
        self.text_counts = True
        """whether constants that are text count: those of a dataset are mostly paths, and its samples count anyway"""
        self.known: dict[int, str] = {}
        """id of an object -> the name under which it is described"""
        self._seen: set[int] = set()
        self._names: set[str] = set()
        """globals and attributes that the code mentions: a setting that it does not mention does not count"""
        self._writes: dict[int, set[str]] = {}
        self._values: list[tuple[str, Any]] = []
        """values that the code refers to, which are described after all code is known"""

    def add(self, value: Any, name: str) -> None:
        """Adds a function, class or object: two runs with the same parts run the same code."""
        self.follow(value)
        self._values.append((name, value))

    def describe_values(self) -> None:
        """Adds the values that the code refers to. Their classes may refer to more of them."""
        while self._values:
            name, value = self._values.pop(0)
            for line, text in self.lines(value, name):
                self._set(line, text)

    def _add_function(self, function: types.FunctionType, generated: bool = False) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self.follow(getattr(function, "__wrapped__", None))
        if not is_user_file(function.__code__.co_filename):
            return self._add_package(function.__module__)
        written = written_names(function.__code__)
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells = {n: cell.cell_contents for n, cell in closure.items() if has_contents(cell) and n not in written}
        defaults = {str(n): value for n, value in enumerate(function.__defaults__ or ())}
        values = defaults | (function.__kwdefaults__ or {}) | cells
        plain = [(name, value) for name, value in values.items() if is_plain(value) and self.counts(value)]
        text = "\n".join([*instructions(function.__code__), *map(plain_text, plain)])
        self._set(f"function {qualified_name(function)}", text_hash(text))
        if not generated:
            self._names.update(code_names(function.__code__))
        for name, value in values.items():
            self._refer(f"value {qualified_name(function)}.{name}", value, is_plain(value))
        written |= self._written_globals(function)
        for name, value in references(function):
            self._refer(f"constant {name}", value, name.rpartition(".")[2] in written)

    def _written_globals(self, function: types.FunctionType) -> set[str]:
        """The global variables that the functions of a function's module change."""
        variables = function.__globals__
        if id(variables) not in self._writes:
            functions = [f for f in variables.values() if isinstance(f, types.FunctionType)]
            codes = [f.__code__ for f in functions if f.__globals__ is variables]
            self._writes[id(variables)] = set().union(*map(written_names, codes)) & variables.keys()
        return self._writes[id(variables)]

    def _refer(self, name: str, value: Any, code_only: bool) -> None:
        """Follows what a function refers to, and notes a value to be described."""
        self.follow(value)
        if not code_only and self.counts(value) and is_data(value):
            self._values.append((name, value))

    def counts(self, value: Any) -> bool:
        """Whether a default, a constant or a value in a closure is part of the fingerprint."""
        return self.text_counts or (is_plain(value) and not isinstance(value, str))

    def follow(self, value: Any) -> None:
        """Adds a value if it is code; other objects are data."""
        if isinstance(value, functools.partial):
            self.follow(value.func)
        elif isinstance(value, types.MethodType):
            self._add_class(type(value.__self__))
            self.follow(value.__func__)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif callable(value) and hasattr(value, "__name__"):  # a builtin, such as an operator of torch, or a cache
            self.follow(getattr(value, "__wrapped__", None))
            self._add_package(value.__module__)

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) in self._seen or base is object:
                continue
            self._seen.add(id(base))
            if not is_user_class(base):
                self._add_package(base.__module__)
                continue
            for name, function in class_methods(base).items():
                self._add_function(function, dataclasses.is_dataclass(base) and name in GENERATED)
            constants = {n: v for n, v in sorted(vars(base).items()) if is_plain(v) and self.counts(v)}
            constants = {name: value for name, value in constants.items() if not name.startswith("__")}
            self._set(f"class {qualified_name(base)}", text_hash(plain_text(constants)))

    def lines(self, value: Any, name: str) -> list[tuple[str, str]]:
        """Describes a value and the values inside it, in a bounded number of lines."""
        lines = list(islice(self.describe(value, name, 0), MAX_VALUES))
        if len(lines) <= MAX_LINES:
            return lines
        return [(name, f"{lines[0][1]} of {len(lines)} values, hash {text_hash(plain_text(lines))}")]

    def describe(self, value: Any, name: str, depth: int) -> Lines:
        """The lines of a value: constants, code and tensors by what they are, containers and the user's objects by what
        is inside them, other objects by their class.
        """
        if is_setting(value):
            self.follow(value)
            yield name, plain_text(value)
        elif isinstance(value, Tensor):
            yield name, tensor_text(value, with_values=not value.requires_grad)
        elif isinstance(value, np.ndarray):
            numeric = value.dtype.kind in "biuf"
            shape = f"{list(value.shape)} {value.dtype}"
            yield name, f"{shape} {tensor_text(torch.from_numpy(value.astype(float)), True)}" if numeric else shape
        elif isinstance(value, (enum.Enum, set, frozenset)) or not is_data(value):
            yield name, plain_text(value)
        elif id(value) in self.known:
            yield name, f"the same object as {self.known[id(value)]}"
        else:
            self.known[id(value)] = name
            items = list(islice(self.items(value), MAX_VALUES)) if depth < MAX_DEPTH else []
            yield name, f"{qualified_name(type(value))}({len(items)})" if is_container(value) else object_name(value)
            for key, item in items:
                yield from self.describe(item, f"{name}.{key}", depth + 1)

    def items(self, value: Any) -> Iterator[tuple[str, Any]]:
        """The (name, value) of what is inside a container, a function with arguments, or an object."""
        if isinstance(value, dict):
            yield from ((plain_text(key), item) for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            yield from ((str(index), item) for index, item in enumerate(value))
        elif isinstance(value, functools.partial):
            self.follow(value.func)
            yield from self.items(value.args)
            yield from sorted(value.keywords.items())
        elif isinstance(value, types.MethodType):
            self.follow(value)
            yield "self", value.__self__
        else:
            self._add_class(type(value))
            yield from self.attributes(value).items()
            if isinstance(value, nn.Module):
                yield from {**value._parameters, **constant_buffers(value), **value._modules}.items()

    def attributes(self, value: Any) -> dict[str, Any]:
        """The attributes of an object that are settings: of the user's objects all that their methods do not change, of
        other objects public constants and functions. A private attribute that the user's code does not mention is one
        of a base class.
        """
        found = instance_attributes(value)
        cls: Any = type(value)
        if isinstance(value, NAMESPACES) or dataclasses.is_dataclass(cls):
            return {name: item for name, item in found.items() if name in self._names and name not in state_of(cls)}
        if not is_user_class(cls):
            public = {name: item for name, item in found.items() if not name.startswith("_")}
            return {n: item for n, item in public.items() if is_setting(item) or isinstance(item, functools.partial)}
        skipped = state_of(cls) | (MODULE_ATTRIBUTES if isinstance(value, nn.Module) else set())
        return {
            name: item
            for name, item in found.items()
            if name not in skipped
            and (name in self._names or not name.startswith("_"))
            and not (isinstance(item, Tensor) and is_random(cls))
        }

    def _add_package(self, module: str | None) -> None:
        package = (module or "builtins").partition(".")[0]
        if package not in UNCOUNTED_PACKAGES:
            self._set(f"package {package}", package_version(package))

    def _set(self, name: str, value: str) -> None:
        """Sets a part; two lambdas of one function have the same name."""
        if name in self.parts and self.parts[name] != value:
            value = text_hash(f"{self.parts[name]} {value}")
        self.parts[name] = value


def class_methods(cls: type) -> dict[str, types.FunctionType]:
    """The functions of a class, also those of properties, class methods and static methods."""
    found = {}
    for name, value in sorted(vars(cls).items()):
        function = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
        if isinstance(function, types.FunctionType):
            found[name] = function
    return found


def all_methods(cls: type) -> dict[str, types.FunctionType]:
    """The methods of a class and of its bases in the user's code."""
    bases = [base for base in cls.__mro__ if is_user_class(base)]
    return {name: method for base in reversed(bases) for name, method in class_methods(base).items()}


@functools.lru_cache(maxsize=1024)
def state_of(cls: type) -> set[str]:
    return state_names(all_methods(cls))


@functools.lru_cache(maxsize=1024)
def is_random(cls: type) -> bool:
    return builds_random_values(all_methods(cls))


def constant_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module whose values count: those of a loss of torch, such as class weights, and of the user's
    modules unless they are random or their methods change them.
    """
    cls: Any = type(module)
    if cls.__module__ == "torch.nn.modules.loss":
        return dict(module._buffers)
    if not is_user_class(cls) or is_random(cls):
        return {}
    return {name: buffer for name, buffer in module._buffers.items() if name not in state_of(cls)}


def instance_attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, also those in slots, sorted by name."""
    slots = {name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())}
    found = {name: getattr(value, name) for name in slots if hasattr(value, name) and not name.startswith("__")}
    return dict(sorted((found | getattr(value, "__dict__", {})).items()))


def is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple))


def is_data(value: Any) -> bool:
    """Whether a value says more than its class: a constant, a container, a tensor, or an object with settings."""
    kinds = (list, tuple, dict, set, frozenset, enum.Enum, Tensor, np.ndarray, nn.Module, functools.partial)
    if isinstance(value, (type, types.FunctionType, types.ModuleType)):
        return False
    if is_plain(value) or isinstance(value, (*kinds, *NAMESPACES, types.MethodType)):
        return True
    return dataclasses.is_dataclass(value) or is_user_class(type(value))


def object_name(value: Any) -> str:
    if isinstance(value, types.MethodType):
        return qualified_name(value.__func__)
    return f"partial({plain_text(value.func)})" if isinstance(value, functools.partial) else qualified_name(type(value))


def instructions(code: types.CodeType) -> Iterator[str]:
    """The instructions of a code object and of those inside it, with constants and names instead of their indices.
    Line numbers, comments and docstrings are not part of them.
    """
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        if isinstance(value, types.CodeType):
            yield from instructions(value)
        else:
            yield f"{instruction.opname} {plain_text(value)}"


def references(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The (name, value) of what a function refers to in the user's modules: globals, and attributes of modules."""
    names = set(code_names(function.__code__))
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            if is_user_file(getattr(value, "__file__", None) or "<frozen"):
                yield from ((f"{value.__name__}.{n}", vars(value)[n]) for n in sorted(names & vars(value).keys()))
        else:
            yield f"{function.__module__}.{name}", value


def is_user_class(value: Any) -> bool:
    """Whether a value is a class of the user's code. In a notebook, its module has no file."""
    if not isinstance(value, type) or value.__module__ in sys.stdlib_module_names:
        return False
    module = sys.modules.get(value.__module__)
    return is_user_file(getattr(module, "__file__", None) or "<notebook>")


def is_plain(value: Any) -> bool:
    """Whether a value is a constant whose text says everything about it."""
    if isinstance(value, (tuple, list, frozenset)):
        return len(value) <= 32 and all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def plain_text(value: Any) -> str:
    """The text of a value without addresses: constants and containers in full, code by its name, others by class."""
    if type(value) in (tuple, list):
        return f"[{', '.join(map(plain_text, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(plain_text, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{plain_text(key)}: {plain_text(item)}' for key, item in value.items())}}}"
    if is_plain(value):
        text = repr(value)
        return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}... {text_hash(text)}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return qualified_name(value)
    if isinstance(value, functools.partial):
        return f"partial({plain_text(value.func)}, {plain_text(value.args)}, {plain_text(value.keywords)})"
    if isinstance(value, enum.Enum):
        return f"{qualified_name(type(value))}.{value.name}"
    return str(value) if isinstance(value, (torch.dtype, torch.Size)) else qualified_name(type(value))


def is_setting(value: Any) -> bool:
    """Whether an attribute of an object is a setting: a constant, a function, a class or a torch dtype."""
    kinds = (types.FunctionType, types.BuiltinFunctionType, type, torch.dtype, torch.Size)
    return is_plain(value) or isinstance(value, kinds)


def qualified_name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def has_contents(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False


@functools.cache
def package_version(package: str) -> str:
    found = getattr(sys.modules.get(package), "__version__", None)
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
