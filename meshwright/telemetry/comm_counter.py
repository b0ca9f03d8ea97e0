"""The traffic ledger: every collective issued while it is open, by mesh axis, with message and wire bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshwright.topology.collectives import find_collective, wire_bytes
from meshwright.torch_private import OpOverload, TorchDispatchMode, resolve_process_group

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
RECEIVES = ("recv", "irecv")
"""A message is counted where it is sent."""


CONTROL = "control"
"""The axis of the few numbers that ranks agree on at each step: they use the group of an axis and are none of its."""
TALK: list[None] = []


@contextmanager
def control_traffic() -> Iterator[None]:
    """Collectives inside count as control."""
    TALK.append(None)
    try:
        yield
    finally:
        TALK.pop()


@dataclass(frozen=True, order=True)
class CollectiveTotal:
    """All calls of one collective on one axis. Bytes are sums over the calls."""

    axis: str
    collective: str
    calls: int
    message_bytes: int
    wire_bytes: int
    ranks: int


class CommCounter(TorchDispatchMode):
    """Counts inside `with ledger:`, forward and backward. `axes` gives the axis of a process group by its name."""

    supports_higher_order_operators = True

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axes = axes
        self._sums: dict[tuple[str, str, int], tuple[int, int]] = {}

    def rows(self) -> list[CollectiveTotal]:
        return sorted(
            CollectiveTotal(axis, collective, calls, message, wire_bytes(collective, message, ranks), ranks)
            for (axis, collective, ranks), (calls, message) in self._sums.items()
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrappers(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if collective := collective_of(func):
            self._count(collective, func, (*args, *(kwargs or {}).values()), result)
        return result

    def _count(self, collective: str, func: OpOverload, args: tuple[Any, ...], result: Any) -> None:
        group = group_of(func, args)
        axis, ranks = CONTROL if TALK else self._axes.get(group.group_name, "other"), group.size()
        message = message_of(func, collective, args, result)
        calls, messages = self._sums.get((axis, collective, ranks), (0, 0))
        self._sums[axis, collective, ranks] = (calls + 1, messages + message)


def has_wrappers(types: Any) -> bool:
    """Whether tensors that wrap others (DTensor and its like) are among an operator's arguments.

    A mode is asked before they are. If it declines, they unwrap themselves with the mode still in place, and what they
    do with their local tensors, collectives too, comes back to it.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


@cache
def collective_of(func: Any) -> str | None:
    """Which collective an operator is; None for all others."""
    if not isinstance(func, OpOverload) or func.namespace not in NAMESPACES:
        return None
    name = func.name().partition("::")[2].lstrip("_")
    if name.startswith(RECEIVES) or group_index(func) is None:  # the others wait for a result, or wrap it
        return None
    return find_collective(name) or "other"


@cache
def group_index(func: OpOverload) -> int | None:
    """Which argument is the process group."""
    names = [argument.name for argument in func._schema.arguments]
    return next((index for index, name in enumerate(names) if name in ("process_group", "group_name")), None)


def group_of(func: OpOverload, args: tuple[Any, ...]) -> dist.ProcessGroup:
    """Operators of c10d carry the group as a script object; functional ones carry its name, or the group itself."""
    group = args[group_index(func) or 0]
    if isinstance(group, str):
        return resolve_process_group(group)
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an operator's argument or result, out of their lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def message_of(func: OpOverload, collective: str, args: tuple[Any, ...], result: Any) -> int:
    """The whole tensor: before it is scattered, or after it is gathered. Of an exchange it is what this rank gives: it
    may get more or less, and over all ranks both are the same.
    """
    if collective == "barrier":
        return 0
    if collective == "all_to_all":
        return bytes_in(args[1 if func.namespace == "c10d" else 0])  # c10d's come after the outputs
    return max(map(bytes_in, (*args, result)))


def bytes_in(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
