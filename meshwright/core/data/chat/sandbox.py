"""The environment in which an untrusted chat template runs: bounded work, bounded values, no clock and no chance.

Every operation of a template pays for the values that it reads, and what it makes is counted; a record whose template
has spent its budget is refused. What could make a large value of a small one is not available, or its result is bounded
before it exists. Objects have no other methods than those in `METHODS`: bytes, for example, are out of reach.
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
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEXT = 16 << 20
"""Characters of a text, and elements of a list."""
MAX_STEPS = 4 << 20
"""Steps of a template per record."""
MAX_MADE = 64 << 20
"""Characters that one rendering makes, each of which takes up to 4 bytes."""
ELEMENT = 16
"""Characters that count for an element of a list: its object takes about 64 bytes."""
STEP_CHARACTERS = 64
"""Characters of a text that are read or written in one step."""
STATEMENTS_PER_STEP = 4
"""Nodes of the syntax tree in the body of a loop or of a macro that are run in one step."""
STEP_COMPARISONS = 512
"""Characters of a text that are compared in one step."""
MAX_BITS = 64
"""Bits of an integer."""


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FILTERS = names(
    "abs capitalize count d default dictsort e escape first float groupby int items join last length list lower map"
    " max min reject rejectattr replace reverse safe select selectattr sort string title tojson trim truncate unique"
    " upper wordcount"
)
FREE_FILTERS = names("count d default first last length")
"""Filters whose work does not depend on the size of their values."""
ITERATING_FILTERS = names(
    "dictsort groupby items list map max min reject rejectattr reverse select selectattr sort title unique wordcount"
)
"""Filters that make an object per character of a text."""
PAID_TESTS = names("eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >= in lower upper")
SEARCHES = names("count find index lstrip partition replace rfind rindex rpartition rsplit rstrip split strip")
"""Methods of a text that compare it with an argument at every position."""
TEXT_METHODS = SEARCHES | names(
    "capitalize casefold endswith isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable"
    " isspace istitle isupper join lower removeprefix removesuffix splitlines startswith swapcase title upper"
)
LOOP = names("changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0")
METHODS: tuple[tuple[Any, frozenset[str]], ...] = (
    (str, TEXT_METHODS),
    (dict, names("get items keys values")),
    ((list, tuple), names("count index")),
    (LoopContext, LOOP),
)
"""(class, the attributes that a template can read); a namespace has those that the template sets."""
SEQUENCES: tuple[Any, ...] = (list, tuple, KeysView, ValuesView, ItemsView)
CONTAINERS: tuple[Any, ...] = (*SEQUENCES, dict)
GLOBALS = names("dict namespace range")
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


OTHER_TEMPLATE = "try another data.chat_template"


class LimitExceeded(TemplateError):
    """The template has reached a limit; `hint` says what to do."""

    def __init__(self, message: str, hint: str = "try a shorter chat, or another data.chat_template") -> None:
        super().__init__(message)
        self.hint = hint


class BoundedCode(CodeGenerator):
    """Compiles a template so that loops, outputs and operators pay; no part is computed when it is compiled."""

    def _output_child_to_const(self, *_: object) -> Never:
        raise nodes.Impossible

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = call("read_items", [node.iter], node)
        pay_for_body(node)
        super().visit_For(node, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        pay_for_body(node)
        super().visit_Macro(node, frame)

    def visit_CallBlock(self, node: nodes.CallBlock, frame: Frame) -> None:
        pay_for_body(node)
        super().visit_CallBlock(node, frame)

    def refuse(self, node: nodes.Node, frame: Frame) -> Never:  # noqa: ARG002
        """There is no other template to load, and each statement copies all names, which takes quadratic memory."""
        raise LimitExceeded(f"{type(node).__name__.lower()} is not available in a chat template", OTHER_TEMPLATE)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = refuse

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.visit(call("concatenate", node.nodes, node), frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        if any(operand.op not in ("eq", "ne") or not isinstance(operand.expr, nodes.Const) for operand in node.ops):
            node.expr = call("read", [node.expr], node)
            for operand in node.ops:
                operand.expr = call("read", [operand.expr], node)
        super().visit_Compare(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            return super().visit_Getitem(node, frame)
        self.write("environment.sliced(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("environment.made(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        self.write("environment.made(" if node.ctx == "load" else "(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.made(")
        super().visit_Dict(node, frame)
        self.write(")")


def pay_for_body(node: nodes.For | nodes.Macro | nodes.CallBlock) -> None:
    """Each round of a loop, and each call of a macro, pays for its statements: many of them pay for nothing else."""
    size = sum(1 for statement in node.body for _ in statement.find_all(nodes.Node)) // STATEMENTS_PER_STEP
    if size:
        node.body.insert(0, nodes.ExprStmt(call("pay", [nodes.Const(size)], node), lineno=node.lineno))


def call(method: str, arguments: list[Any], origin: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None, lineno=origin.lineno)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget of steps for a record, which `start` renews, and one of characters for each of its
    renderings, which `start_rendering` renews.
    """

    code_generator_class = BoundedCode
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, extensions: list[Any]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self.write,
            extensions=[*extensions, loopcontrols],
        )
        self.steps = self.room = 0
        own: dict[str, Callable[..., Any]] = {
            "tojson": to_json,
            "replace": self.replace_text,
            "join": self.join_text,
            "trim": self.trim_text,
        }
        filters: dict[str, Callable[..., Any]] = {name: own.get(name, self.filters[name]) for name in FILTERS}
        self.filters = {
            name: function if name in FREE_FILTERS else self.paid(function, name in ITERATING_FILTERS)
            for name, function in filters.items()
        }
        self.tests |= {name: self.paid(cast("Callable[..., Any]", self.tests[name])) for name in PAID_TESTS}
        self.globals = {name: self.globals[name] for name in GLOBALS}
        self.globals["raise_exception"] = raise_exception

    def start(self) -> None:
        self.steps = MAX_STEPS

    def start_rendering(self) -> None:
        self.room = MAX_MADE

    def pay(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise LimitExceeded(
                f"it takes more than {MAX_STEPS:,} steps for one record",
                "try a shorter chat, or {% generation %} blocks around the answers, so that it is rendered once",
            )

    def take(self, characters: int) -> None:
        """Counts what is made."""
        self.room -= characters
        if self.room < 0:
            raise LimitExceeded(f"it makes more than {MAX_MADE:,} characters")

    def read(self, value: Any) -> Any:
        """The value, after its contents are paid for."""
        self.measure(value)
        return value

    def write(self, value: Any) -> Any:
        """The value, after its text is counted."""
        self.take(self.measure(value))
        return value

    def made(self, value: Any) -> Any:
        """A new value, after it is paid for and counted; what it contains, other than texts, is not new."""
        self.measure(value)
        if isinstance(value, str):
            self.take(len(value))
        elif isinstance(value, CONTAINERS):
            self.take(sum(ELEMENT + (len(item) if isinstance(item, str) else 0) for item in value))
        return value

    def sliced(self, value: Any) -> Any:
        """A slice, which is a copy."""
        if isinstance(value, str | list | tuple):
            self.pay(len(value) // STEP_CHARACTERS)
            self.take(len(value) * (1 if isinstance(value, str) else ELEMENT))
        return value

    def measure(self, value: Any) -> int:
        """The characters of a value with all that it contains, which are paid for. A function has no text that is the
        same in every process.
        """
        pending, total = [value], 0
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                total = bounded(total + len(item))
                self.pay(1 + len(item) // STEP_CHARACTERS)
                continue
            self.pay(1)
            total += ELEMENT
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
                raise LimitExceeded("a function is no value in a template", OTHER_TEMPLATE)
        return total

    def read_items(self, value: Any) -> list[Any]:
        """The items of a loop."""
        size = len(value) if hasattr(value, "__len__") else 0
        self.pay(size)  # before there is an object for each of them
        items = list(value)
        self.pay(len(items) - size)
        self.take(ELEMENT * len(items))
        return items

    def concatenate(self, *values: Any) -> str:
        texts = [str(self.read(value)) for value in values]
        self.take(bounded(sum(map(len, texts))))
        return "".join(texts)

    def replace_text(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = str(value), str(old), str(new)
        limit = -1 if count is None else count
        self.pay_search(text, old)
        found = text.count(old) if limit < 0 else min(text.count(old), limit)
        bounded(len(text) + found * len(new))
        return text.replace(old, new, limit)

    def join_text(self, value: Any, separator: Any = "", attribute: Any = None) -> str:
        items = self.read_items(value)
        items = items if attribute is None else [self.getitem(item, attribute) for item in items]
        texts, between = [str(self.read(item)) for item in items], str(separator)
        bounded(sum(map(len, texts)) + len(between) * len(texts))
        return between.join(texts)

    def trim_text(self, value: Any, chars: str | None = None) -> str:
        text = str(value)
        self.pay_search(text, chars)
        return text.strip(chars)

    def pay_search(self, text: str, *arguments: Any) -> None:
        """Pays for the worst case of a search, in which every argument is compared at every position."""
        for argument in arguments:
            if isinstance(argument, str):
                self.pay(len(text) * len(argument) // STEP_COMPARISONS)

    def paid(self, function: Callable[..., Any], iterates: bool = False) -> Callable[..., Any]:
        """The function, which pays for its arguments and its result; an iterator is replaced by its items."""

        @wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            self.read([*arguments, *named.values()])
            if iterates:
                self.pay(sum(len(item) for item in arguments if isinstance(item, str)))
            result = function(*arguments, **named)
            return self.made(self.read_items(result) if isinstance(result, Iterator) else result)

        return wrapper

    def wrap_str_format(self, value: Any) -> None:
        """The methods are not available: a format makes a long text of a short one."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        allowed = next((methods for kind, methods in METHODS if isinstance(obj, kind)), frozenset())
        return (attr in allowed or isinstance(obj, Namespace)) and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("_loop_vars", "_block_vars"):  # Jinja passes them to functions of its own
            kwargs.pop(name, None)
        __self.pay(1 + len(args) + len(kwargs))
        __self.take(ELEMENT * (len(args) + len(kwargs)))
        if isinstance(__obj, Macro) or getattr(__obj, "__self__", None) is __self:
            return super().call(__context, __obj, *args, **kwargs)
        if "caller" not in kwargs:
            __self.read([*args, *kwargs.values()])
        if isinstance(__obj, LoopContext) and args:
            args = (__self.read_items(args[0]), *args[1:])
        value = getattr(__obj, "__self__", None)
        if isinstance(value, str):
            return __self.call_text(__obj.__name__, value, *args, **kwargs)
        if isinstance(value, list | tuple | dict):
            __self.pay(len(value) // STEP_CHARACTERS)
        return super().call(__context, __obj, *args, **kwargs)

    def call_text(self, method: str, text: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of a text, after its work and the objects that it makes are paid for."""
        self.pay(len(text) // STEP_CHARACTERS)
        if method == "replace":
            return self.made(self.replace_text(text, *args, **kwargs))
        if method == "join":
            return self.made(self.join_text(args[0], text))
        if method in SEARCHES:
            self.pay_search(text, *args, *kwargs.values())
        if method in ("split", "rsplit"):
            separator = args[0] if args else kwargs.get("sep")
            self.pay(text.count(separator) if isinstance(separator, str) else len(text) // 2)
        elif method == "splitlines":
            self.pay(sum(map(text.count, LINE_ENDS)))
        return self.made(getattr(text, method)(*args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" or (operator != "+" and not numbers):
            raise LimitExceeded(
                f"the operator {operator} is not available for {type(left).__name__} in a template", OTHER_TEMPLATE
            )
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            bounded(len(left) + len(right))
        return self.made(super().call_binop(context, operator, left, right))


def bounded(length: int) -> int:
    if length > MAX_TEXT:
        raise LimitExceeded(f"a value in the template has more than {MAX_TEXT:,} characters or elements")
    return length


def bounded_integer(number: int) -> None:
    if number.bit_length() > MAX_BITS:
        raise LimitExceeded(f"an integer in the template has more than {MAX_BITS} bits")


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
