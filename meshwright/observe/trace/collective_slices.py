"""Collectives of a profiled rank, from call to completion, with their process group and number.

The flight recorder of torch knows the group, the number and the time of the call. The profile knows when the collective
was completed: by the kernel of NCCL, which names its group, or by the worker thread of Gloo, which does not. A group of
Gloo has worker threads of its own that take its collectives in order, so each is identified by the first one it takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from meshwright.observe.trace.profile_files import ProfileHead, RecordedCollective
from meshwright.telemetry.untrusted_records import finite_number
from meshwright.topology.collectives import find_collective

MAX_RUNS = 200_000
"""Executions of collectives, and calls of operators, that are kept of one profile."""
TOLERANCE = 50.0
"""Microseconds by which the clocks of the recorder and of the profiler may differ."""


@dataclass(frozen=True)
class CollectiveSlice:
    """One collective on one rank."""

    rank: int
    step: int
    group: str
    axis: str
    sequence: int
    collective: str
    begin: float
    """the call, in microseconds of the clock of rank 0"""
    end: float
    """the completion"""
    elements: int


@dataclass(frozen=True, order=True)
class Execution:
    """A collective that a worker thread of Gloo or a stream of NCCL executes."""

    begin: float
    end: float
    collective: str
    group: str
    """empty if the profile does not say it"""
    thread: Any


class CollectiveMatcher:
    """Collects the events of one profile that belong to collectives; `slices` joins them with what was recorded."""

    def __init__(self, head: ProfileHead) -> None:
        self._head = head
        self._executions: list[Execution] = []
        self._calls: list[tuple[float, float, str]] = []

    def add(self, event: dict[str, Any]) -> None:
        """Takes an event, if it belongs to a collective."""
        name, begin, duration = event.get("name"), finite_number(event.get("ts")), finite_number(event.get("dur"))
        if not isinstance(name, str) or begin is None or duration is None:
            return
        begin += self._head.base
        end = begin + duration
        args = event.get("args")
        group = args.get("Process Group Name") if isinstance(args, dict) and event.get("cat") == "kernel" else None
        if name.startswith("gloo:") and len(self._executions) < MAX_RUNS:
            self._executions.append(Execution(begin, end, name.removeprefix("gloo:")[:64], "", repr(event.get("tid"))))
        elif isinstance(group, str) and len(self._executions) < MAX_RUNS:
            self._executions.append(Execution(begin, end, name[:64], group[:64], ""))
        elif name.startswith("c10d::") and len(self._calls) < MAX_RUNS:
            operator = find_collective(name.removeprefix("c10d::").lstrip("_"))
            if operator is not None:
                self._calls.append((begin, end, operator))

    def slices(self) -> list[CollectiveSlice]:
        """Returns the recorded collectives whose completion is in the profile, in the order of their calls."""
        names = CallNames(self._calls)
        return sorted(
            (
                CollectiveSlice(
                    self._head.place.rank,
                    recorded.step,
                    recorded.group,
                    self._head.axis(recorded.group),
                    recorded.sequence,
                    names.at(recorded.begin) or recorded.collective,
                    recorded.begin,
                    max(recorded.begin, execution.end),
                    recorded.elements,
                )
                for recorded, execution in match_executions(self._head.collectives, self._executions)
            ),
            key=lambda item: item.begin,
        )


class CallNames:
    """Finds the operator that called a collective: Gloo executes a reduce-scatter as an all-reduce, for example."""

    def __init__(self, calls: Iterable[tuple[float, float, str]]) -> None:
        self._calls = sorted(calls)
        self._begins = [begin for begin, _, _ in self._calls]

    def at(self, time: float) -> str:
        """Returns the collective that was called at a time, or an empty string."""
        index = bisect_right(self._begins, time + TOLERANCE) - 1
        if index < 0 or self._calls[index][1] + TOLERANCE < time:
            return ""
        return self._calls[index][2]


def match_executions(
    recorded: Iterable[RecordedCollective], executions: Iterable[Execution]
) -> list[tuple[RecordedCollective, Execution]]:
    """Joins recorded collectives with their executions, which begin in the order of the calls within a group."""
    queues: dict[str, deque[RecordedCollective]] = {}
    for collective in sorted(recorded, key=lambda item: item.begin):
        queues.setdefault(collective.group, deque()).append(collective)
    groups: dict[Any, str] = {}
    matched = []
    for execution in sorted(executions):
        group = execution.group or groups.get(execution.thread) or nearest_group(queues, execution)
        queue = queues.get(group)
        if queue and queue[0].begin <= execution.begin + TOLERANCE:
            if not execution.group:
                groups[execution.thread] = group
            matched.append((queue.popleft(), execution))
    return matched


def nearest_group(queues: dict[str, deque[RecordedCollective]], execution: Execution) -> str:
    """Returns the group whose next collective is of the same kind and was called last before an execution: an idle
    worker thread takes a collective at once.
    """
    called = {
        group: queue[0].begin
        for group, queue in queues.items()
        if queue and queue[0].collective == execution.collective and queue[0].begin <= execution.begin + TOLERANCE
    }
    return max(called, key=lambda group: called[group], default="")
