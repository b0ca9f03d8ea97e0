"""Counts every collective by mesh axis, with message and wire bytes, as a dispatch mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.base.topology.collectives import find_collective, wire_bytes
from meshwright.core.fake_operators import RunOperator, has_wrappers, run_operator
from meshwright.core.torch_private import OpOverload, TorchDispatchMode, resolve_process_group

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
RECEIVES = ("recv", "irecv")
"""Operators that are not counted, because a message is counted where it is sent."""

CONTROL = "control"
"""The axis of small control messages, such as the step control vector; they use the group of another axis."""
_control_depth: list[None] = []


@contextmanager
def control_messages() -> Iterator[None]:
    """Collectives inside are counted under the axis `control`."""
    _control_depth.append(None)
    try:
        yield
    finally:
        _control_depth.pop()


@dataclass(frozen=True, order=True)
class CollectiveTotal:
    """All calls of one collective on one axis; the bytes are sums over the calls."""

    axis: str
    collective: str
    calls: int
    message_bytes: int
    wire_bytes: int
    ranks: int


class CountingMode(TorchDispatchMode):
    """A dispatch mode that changes nothing: `observe` runs an operator and counts what it does. Compiled code runs as
    it is, and the mode sees the operators that it calls, collectives among them; without `ignore_compile_internals`,
    compiled functions would run eagerly.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrappers(types):
            return NotImplemented
        return self.observe(func, args, kwargs or {})

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: RunOperator = run_operator) -> Any:
        """Runs an operator by `run`, and counts it."""
        raise NotImplementedError


class CommCounter(CountingMode):
    """Counts inside a `with` block, in forward and backward. `axes` maps the name of a process group to its axis."""

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes = axes
        self._sums: dict[tuple[str, str, int], tuple[int, int]] = {}

    def rows(self) -> list[CollectiveTotal]:
        return sorted(
            CollectiveTotal(axis, collective, calls, message, wire_bytes(collective, message, ranks), ranks)
            for (axis, collective, ranks), (calls, message) in self._sums.items()
        )

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: RunOperator = run_operator) -> Any:
        result = run(func, args, kwargs)
        if collective := collective_of(func):
            self._count(collective, func, (*args, *kwargs.values()), result)
        return result

    def _count(self, collective: str, func: OpOverload, args: tuple[Any, ...], result: Any) -> None:
        group = group_of(func, args)
        axis, ranks = CONTROL if _control_depth else self._axes.get(group.group_name, "other"), group.size()
        message = message_bytes_of(func, collective, args, result)
        calls, messages = self._sums.get((axis, collective, ranks), (0, 0))
        self._sums[axis, collective, ranks] = (calls + 1, messages + message)


@cache
def collective_of(func: Any) -> str | None:
    """Returns the name of the collective that an operator is, or None."""
    if not isinstance(func, OpOverload) or func.namespace not in NAMESPACES:
        return None
    name = func.name().partition("::")[2].lstrip("_")
    if (
        name.startswith(RECEIVES) or group_index(func) is None
    ):  # operators without a group wait for a result, or wrap it
        return None
    return find_collective(name) or "other"


@cache
def group_index(func: OpOverload) -> int | None:
    """Returns the index of the process group among an operator's arguments."""
    names = [argument.name for argument in func._schema.arguments]
    return next((index for index, name in enumerate(names) if name in ("process_group", "group_name")), None)


def group_of(func: OpOverload, args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Returns the process group. c10d operators take it as a script object, functional ones by name or as the group."""
    group = args[group_index(func) or 0]
    if isinstance(group, str):
        return resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of an operator's argument or result, from nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def message_bytes_of(func: OpOverload, collective: str, args: tuple[Any, ...], result: Any) -> int:
    """Returns the message bytes: those of the full tensor, before a scatter or after a gather. For an all-to-all, they
    are the bytes that this rank sends, which may differ from what it receives.
    """
    if collective == "barrier":
        return 0
    if collective == "all_to_all":
        return bytes_in(args[1 if func.namespace == "c10d" else 0])  # c10d's inputs come after its outputs
    return max(map(bytes_in, (*args, result)))


def bytes_in(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
