"""The environment in which an untrusted chat template runs: bounded work, bounded values, no clock and no chance.

Every operation of a template pays for the values that it reads and makes; a record whose template has spent its budget
is refused. What could make a large value of a small one is not available, or its result is bounded before it exists.
Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from functools import wraps
from typing import Any, Never, cast

from jinja2 import TemplateError, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import loopcontrols
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEXT = 16 << 20
"""Characters of a text, and elements of a list."""
MAX_STEPS = 4 << 20
"""Steps of a template per record."""
STEP_CHARACTERS = 64
"""Characters of a text that are read or written in one step."""
MAX_BITS = 64
"""Bits of an integer."""
FILTERS = frozenset(
    [
        "abs",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "groupby",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "title",
        "tojson",
        "trim",
        "truncate",
        "unique",
        "upper",
        "wordcount",
    ]
)
FREE_FILTERS = frozenset(("count", "d", "default", "first", "last", "length"))
"""Filters whose work does not depend on the size of their values."""
COMPARISONS = frozenset(
    ["eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=", "in"]
)
UNBOUNDED_METHODS = frozenset(["center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"])
SEQUENCES: tuple[Any, ...] = (list, tuple, KeysView, ValuesView, ItemsView)
GLOBALS = frozenset(("dict", "namespace", "range"))


class BoundedCode(CodeGenerator):
    """Compiles a template so that loops, outputs and operators pay; no part is computed when it is compiled."""

    def _output_child_to_const(self, *_: object) -> Never:
        raise nodes.Impossible

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = call("read_items", [node.iter], node)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.visit(call("concatenate", node.nodes, node), frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        if any(operand.op not in ("eq", "ne") or not isinstance(operand.expr, nodes.Const) for operand in node.ops):
            node.expr = call("read", [node.expr], node)
            for operand in node.ops:
                operand.expr = call("read", [operand.expr], node)
        super().visit_Compare(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            node.node = call("read_slice", [node.node], node)
        super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.read(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        self.write("environment.read(" if node.ctx == "load" else "(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.read(")
        super().visit_Dict(node, frame)
        self.write(")")


def call(method: str, arguments: list[Any], origin: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None, lineno=origin.lineno)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget of steps, which `start` renews."""

    code_generator_class = BoundedCode
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, extensions: list[Any]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self.read,
            extensions=[*extensions, loopcontrols],
        )
        self.steps = 0
        own: dict[str, Callable[..., Any]] = {
            "tojson": to_json,
            "replace": self.replace_text,
            "join": self.join_text,
        }
        filters: dict[str, Callable[..., Any]] = {name: own.get(name, self.filters[name]) for name in FILTERS}
        self.filters = {
            name: function if name in FREE_FILTERS else self.paid(function) for name, function in filters.items()
        }
        self.tests |= {name: self.paid(cast("Callable[..., Any]", self.tests[name])) for name in COMPARISONS}
        self.globals = {name: self.globals[name] for name in GLOBALS}
        self.globals["raise_exception"] = raise_exception

    def start(self) -> None:
        self.steps = MAX_STEPS

    def pay(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise TemplateError(
                f"it takes more than {MAX_STEPS:,} steps for one record; shorten the chat, or mark the answers by "
                "{% generation %} blocks, so that it is rendered once"
            )

    def read(self, value: Any) -> Any:
        """The value, after its contents are paid for. A function has no text that is the same in every process."""
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                self.pay(1 + bounded(len(item)) // STEP_CHARACTERS)
                continue
            self.pay(1)
            if isinstance(item, int):
                bounded_integer(item)
            elif isinstance(item, SEQUENCES):
                pending.extend(item)
            elif isinstance(item, dict):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, Namespace):
                pending.extend(item._Namespace__attrs.values())
            elif callable(item) and not isinstance(item, Undefined):
                raise TemplateError("a function is no value in a template")
        return value

    def read_slice(self, value: Any) -> Any:
        if hasattr(value, "__len__"):
            self.pay(len(value) // STEP_CHARACTERS)
        return value

    def read_items(self, value: Any) -> list[Any]:
        """The items of a loop."""
        items = list(value)
        self.pay(len(items))
        return items

    def concatenate(self, *values: Any) -> str:
        texts = [str(self.read(value)) for value in values]
        bounded(sum(map(len, texts)))
        return "".join(texts)

    def replace_text(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(value), str(old), str(new)
        limit = -1 if count is None else count
        found = text.count(old) if limit < 0 else min(text.count(old), limit)
        bounded(len(text) + found * len(new))
        return text.replace(old, new, limit)

    def join_text(self, value: Any, separator: Any = "", attribute: Any = None) -> str:
        items = list(value) if attribute is None else [self.getitem(item, attribute) for item in value]
        texts, between = [str(self.read(item)) for item in items], str(separator)
        bounded(sum(map(len, texts)) + len(between) * len(texts))
        return between.join(texts)

    def paid(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which pays for its arguments and its result; an iterator is replaced by its items."""

        @wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            self.read([*arguments, *named.values()])
            result = function(*arguments, **named)
            return self.read(self.read_items(result) if isinstance(result, Iterator) else result)

        return wrapper

    def wrap_str_format(self, value: Any) -> None:
        """The methods are not available: a format makes a long text of a short one."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in UNBOUNDED_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.pay(1)
        if isinstance(__obj, Macro) or getattr(__obj, "__self__", None) is __self:
            return super().call(__context, __obj, *args, **kwargs)
        if "caller" not in kwargs:
            __self.read([*args, *kwargs.values()])
        value = __self.read_slice(getattr(__obj, "__self__", None))
        if not isinstance(value, str):
            return super().call(__context, __obj, *args, **kwargs)
        if __obj.__name__ == "replace":
            return __self.read(__self.replace_text(value, *args, **kwargs))
        if __obj.__name__ == "join":
            return __self.join_text(args[0], value)
        return __self.read(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" or (operator != "+" and not numbers):
            raise TemplateError(f"the operator {operator} is not available for {type(left).__name__} in a template")
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            bounded(len(left) + len(right))
        return self.read(super().call_binop(context, operator, left, right))


def bounded(length: int) -> int:
    if length > MAX_TEXT:
        raise TemplateError(f"a value in the template has more than {MAX_TEXT:,} characters or elements")
    return length


def bounded_integer(number: int) -> None:
    if number.bit_length() > MAX_BITS:
        raise TemplateError(f"an integer in the template has more than {MAX_BITS} bits")


def raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    """The filter `tojson` of chat templates, which does not escape HTML."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=min(indent or 0, 8) or None, sort_keys=sort_keys)
    parts, length = [], 0
    for part in encoder.iterencode(value):
        length = bounded(length + len(part))
        parts.append(part)
    return "".join(parts)
