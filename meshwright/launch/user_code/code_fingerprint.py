"""Fingerprints of a user's code: what runs, not how it is written, so that comments and formatting do not count.

A function counts by its bytecode, its defaults, the values that it closes over, and the functions, classes and
constants of the user's modules that it refers to. A class counts by its methods and constants, and those of its bases.
Code of installed packages counts by the version of the package; checkpoints record the versions of torch and Python.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.metadata
import sys
import types
from collections.abc import Iterator
from typing import Any

from meshwright.errors import is_user_file

CodeParts = dict[str, str]
"""What a piece of code consists of ("class project.Net", "function project.loss", "package timm") -> hash or value."""

MAX_VALUE = 200
"""Characters of a constant that a record keeps."""
UNCOUNTED_PACKAGES = {"torch", "builtins", "numpy", "meshwright", *sys.stdlib_module_names}
"""Packages whose versions a checkpoint records (`made_by`), or that do not change the numbers."""


class CodeFingerprint:
    """Collects the parts of a user's code, following what functions and classes refer to."""

    def __init__(self) -> None:
        self.parts: CodeParts = {}
        self.text_counts = True
        """whether constants that are text count: those of a dataset are mostly paths, and its samples count anyway"""
        self._seen: set[int] = set()

    def add(self, value: Any) -> str:
        """Adds a function, class or object, and returns its name: two runs with the same names and parts run the same
        code.
        """
        if isinstance(value, functools.partial):
            arguments = [*value.args, *(f"{key}={plain_text(item)}" for key, item in sorted(value.keywords.items()))]
            return f"partial({', '.join([self.add(value.func), *map(plain_text, arguments)])})"
        if isinstance(value, types.MethodType):
            self.add(value.__self__)
            return self.add(value.__func__)
        if isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif callable(value) and not hasattr(value, "__code__") and hasattr(value, "__name__"):
            self._add_package(value.__module__)  # a builtin, such as an operator of torch
        else:
            self._add_class(type(value))
            return f"{qualified_name(type(value))}({', '.join(plain_attributes(value))})"
        return qualified_name(value)

    def _add_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        self.follow(getattr(function, "__wrapped__", None))
        if not is_user_file(function.__code__.co_filename):
            return self._add_package(function.__module__)
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells = {name: cell.cell_contents for name, cell in closure.items() if has_contents(cell)}
        defaults = dict(enumerate(function.__defaults__ or ())) | (function.__kwdefaults__ or {})
        values = [(name, value) for name, value in (defaults | cells).items() if self.counts(value)]
        text = "\n".join([*instructions(function.__code__), *map(plain_text, values)])
        self._set(f"function {qualified_name(function)}", text_hash(text))
        for value in (cells | defaults).values():
            self.follow(value)
        for name, value in references(function):
            self.follow(value)
            if is_plain(value) and self.counts(value):
                self._set(f"constant {name}", plain_text(value))

    def counts(self, value: Any) -> bool:
        """Whether a default, a constant or a value in a closure is part of the fingerprint."""
        return self.text_counts or not isinstance(value, str)

    def follow(self, value: Any) -> None:
        """Adds what a function refers to if it is code; other objects are data."""
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)) or is_user_class(value):
            self.add(value)

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) in self._seen or base is object:
                continue
            self._seen.add(id(base))
            if not is_user_class(base):
                self._add_package(base.__module__)
                continue
            constants = {}
            for name, value in sorted(vars(base).items()):
                function = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
                if isinstance(function, types.FunctionType):
                    self._add_function(function)
                elif not name.startswith("__") and is_plain(value) and self.counts(value):
                    constants[name] = value
            self._set(f"class {qualified_name(base)}", text_hash(plain_text(constants)))

    def _add_package(self, module: str | None) -> None:
        package = (module or "builtins").partition(".")[0]
        if package not in UNCOUNTED_PACKAGES:
            self._set(f"package {package}", package_version(package))

    def _set(self, name: str, value: str) -> None:
        """Sets a part; two lambdas of one function have the same name."""
        if name in self.parts and self.parts[name] != value:
            value = text_hash(f"{self.parts[name]} {value}")
        self.parts[name] = value


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


def code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_names(constant)


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
    module = type(value).__module__.partition(".")[0]
    return (
        repr(value) if module == "torch" and type(value).__name__ in ("dtype", "Size") else qualified_name(type(value))
    )


def plain_attributes(value: Any) -> list[str]:
    """The public attributes of an object that are settings, such as a dropout rate or an activation function."""
    attributes = sorted(getattr(value, "__dict__", {}).items())
    return [f"{name}={plain_text(item)}" for name, item in attributes if not name.startswith("_") and is_setting(item)]


def is_setting(value: Any) -> bool:
    """Whether an attribute of an object is a setting: a constant, a function, a class or a torch dtype."""
    kinds = (types.FunctionType, types.BuiltinFunctionType, type, functools.partial)
    return is_plain(value) or isinstance(value, kinds) or type(value).__name__ == "dtype"


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
