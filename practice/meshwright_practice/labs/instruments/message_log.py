"""Records the messages of one rank in their order: collectives, sends, receives and waits, with bytes and peers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.base.topology.collectives import wire_bytes
from meshwright.core.fake_operators import RunOperator, run_operator
from meshwright.core.telemetry.comm_counter import (
    NAMESPACES,
    CountingMode,
    bytes_in,
    collective_of,
    message_bytes_of,
)
from meshwright.core.torch_private import OpOverload, wrap_collective_waits

PAUSE = 0.002
"""Seconds after a wait in which Gloo's thread releases the tensors of the message, before memory is counted again."""
RECEIVE, WAIT, MARK = "receive", "wait", "mark"


@dataclass(frozen=True)
class MessageEvent:
    """One event: the start of a collective, send or receive, a wait for one, or a mark that a check has set.

    `bytes` are the message bytes: those of the full tensor. `wire_bytes` are those that this rank sends in a ring.
    """

    kind: str
    bytes: int = 0
    wire_bytes: int = 0
    peer: int = -1
    """the other rank of a send or receive"""
    text: str = ""
    """what a mark says"""


class MessageLog(CountingMode):
    """Records inside a `with` block, on this thread, in forward and backward. One log per process."""

    def __init__(self, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[MessageEvent] = []
        self._ranks = ranks
        self._active = False
        wrap_collective_waits(self._on_wait)

    def __enter__(self) -> MessageLog:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._active = True
        return self

    def __exit__(self, *error: Any) -> None:
        self._active = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def mark(self, text: str) -> None:
        """Adds an event of the check's own, such as a gradient that is ready."""
        if self._active:
            self.events.append(MessageEvent(MARK, text=text))

    def take(self) -> list[MessageEvent]:
        """Returns the events so far and forgets them."""
        events, self.events = self.events, []
        return events

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: RunOperator = run_operator) -> Any:
        if not isinstance(func, OpOverload) or func.namespace not in NAMESPACES:
            return run(func, args, kwargs)
        values = (*args, *kwargs.values())
        collective = collective_of(func)
        name = func.name().partition("::")[2]
        if name.startswith("recv"):
            self.events.append(MessageEvent(RECEIVE, bytes_in(args[0]), peer=args[2] if name == "recv_" else -1))
        result = run(func, args, kwargs)
        if collective is not None:
            size = message_bytes_of(func, collective, values, result)
            peer = int(args[2]) if collective == "send" else -1
            self.events.append(MessageEvent(collective, size, wire_bytes(collective, size, self._ranks), peer))
        return result

    def _on_wait(self, wait: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = wait(*args, **kwargs)
        if self._active:
            self.events.append(MessageEvent(WAIT))
            time.sleep(PAUSE)
        return result


def count_kinds(events: list[MessageEvent]) -> Counter[str]:
    """How many collectives, sends and receives of each kind were started."""
    return Counter(event.kind for event in events if event.kind not in (WAIT, MARK))


def sent_bytes(events: list[MessageEvent]) -> int:
    """Bytes that this rank sends: of messages to one rank as they are, of collectives as a ring does."""
    return sum(event.wire_bytes for event in events)


def describe_kinds(events: list[MessageEvent]) -> str:
    """Such as "6 send, 6 receive"."""
    counts = count_kinds(events)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "no messages"
