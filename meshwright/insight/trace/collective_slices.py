"""Collectives of a profiled rank, from call to completion, with their process group and number.

A kernel of NCCL names its group; it begins when the rank arrives, and kernels of a group are in the same order on all
ranks. An execution by Gloo does not name its group. The flight recorder of torch has the group, the number and the time
of every call, and a group has worker threads of its own that take its collectives in order: the first one that a thread
takes tells which group the thread belongs to.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.base.records.untrusted_records import finite_number, natural_number
from meshwright.base.topology.collectives import find_collective
from meshwright.insight.trace.profile_files import ProfileHead, RecordedCollective

MAX_RUNS = 200_000
"""Executions of collectives, and calls of operators, that are kept of one profile."""
GROUP = "Process Group Name"
PROFILER_STEP = re.compile(r"ProfilerStep#([0-9]{1,12})")
MESSAGES = ("send", "recv", "coalesced")
"""Communication between two ranks of a group, whose order differs from rank to rank."""
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
    """the call, or the begin of the kernel, in microseconds of the clock of rank 0"""
    end: float
    """the completion"""
    elements: int
    on_device: bool = False
    """whether it is a kernel of NCCL"""

    @property
    def call(self) -> tuple[Any, ...]:
        """What is equal for all ranks of one call; messages between two ranks are not linked."""
        is_message = self.collective in MESSAGES
        return (self.group, self.on_device, self.sequence, *((self.rank,) if is_message else ()))


@dataclass(frozen=True, order=True)
class Execution:
    """A collective that a worker thread of Gloo executes."""

    begin: float
    end: float
    collective: str
    thread: str


class CollectiveMatcher:
    """Collects the events of one profile that belong to collectives; `slices` joins them with what was recorded."""

    def __init__(self, head: ProfileHead) -> None:
        self._head = head
        self._executions: list[Execution] = []
        self._calls: list[tuple[float, float, str]] = []
        self._kernels: list[tuple[float, float, dict[str, Any]]] = []
        self._device_steps: list[tuple[float, float, int]] = []

    def add(self, event: dict[str, Any]) -> None:
        """Takes an event, if it belongs to a collective."""
        name, begin, duration = event.get("name"), finite_number(event.get("ts")), finite_number(event.get("dur"))
        if not isinstance(name, str) or begin is None or duration is None:
            return
        begin += self._head.base
        end = begin + duration
        args = event.get("args")
        if name.startswith("gloo:") and len(self._executions) < MAX_RUNS:
            self._executions.append(Execution(begin, end, name.removeprefix("gloo:")[:64], repr(event.get("tid"))[:64]))
        elif event.get("cat") == "kernel" and isinstance(args, dict) and isinstance(args.get(GROUP), str):
            if len(self._kernels) < MAX_RUNS:
                self._kernels.append((begin, end, args))
        elif event.get("cat") == "gpu_user_annotation" and (step := PROFILER_STEP.fullmatch(name)):
            self._device_steps.append((begin, end, int(step[1])))
        elif name.startswith("c10d::") and len(self._calls) < MAX_RUNS:
            operator = find_collective(name.removeprefix("c10d::").lstrip("_"))
            if operator is not None:
                self._calls.append((begin, end, operator))

    def slices(self) -> list[CollectiveSlice]:
        """Returns the collectives whose completion is in the profile, in the order of their begin."""
        return sorted([*self._on_host(), *self._on_device()], key=lambda item: item.begin)

    def _on_host(self) -> Iterator[CollectiveSlice]:
        names = CallNames(self._calls)
        for recorded, execution in match_executions(self._head.collectives, self._executions):
            yield CollectiveSlice(
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

    def _on_device(self) -> Iterator[CollectiveSlice]:
        counts: Counter[str] = Counter()
        for begin, end, args in sorted(self._kernels, key=lambda kernel: kernel[0]):
            group, name = args[GROUP][:64], str(args.get("Collective name", ""))[:64].lstrip("_")
            step = next((step for first, last, step in self._device_steps if first <= begin <= last), -1)
            sequence, counts[group] = counts[group], counts[group] + 1
            yield CollectiveSlice(
                self._head.place.rank,
                step,
                group,
                self._head.axis(group),
                sequence,
                find_collective(name) or name,
                begin,
                end,
                natural_number(args.get("In msg nelems")) or 0,
                on_device=True,
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
    groups: dict[str, str] = {}
    matched = []
    for execution in sorted(executions):
        group = groups.get(execution.thread) or nearest_group(queues, execution)
        queue = queues.get(group)
        if queue and queue[0].begin <= execution.begin + TOLERANCE:
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
