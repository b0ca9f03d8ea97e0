"""Virtual time: an event loop, the clocks of hosts, and processes that sleep, pause and are killed. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

Wait = tuple[float, bool]
"""Until when a process sleeps (clock of its host), and whether an arriving message wakes it sooner."""
Body = Iterator[Wait]
FOREVER = float("inf")
MAX_EVENTS = 60_000
"""Events after which a loop is taken for endless."""


class ProcessKilled(BaseException):
    """Unwinds the code of a process that a fault kills at this instant."""


class EventLoop:
    """Calls functions in the order of virtual time. Everything random is drawn from its generator."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = count()
        self.events, self.max_events = 0, float(MAX_EVENTS)
        self.trace: list[str] | None = None
        """What happened, one line each; None: it is not recorded."""

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        if time < FOREVER:
            heappush(self.heap, (max(time, self.now), next(self.numbers), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + seconds, call, *args)

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Runs until `done`, which is asked after every event, or until no event is left before `until`."""
        heap = self.heap
        while heap and heap[0][0] <= until and self.events < self.max_events:
            self.now, _, call, args = heappop(heap)
            self.events += 1
            call(*args)
            if done():
                return

    def note(self, who: str, text: str) -> None:
        """Adds a line to the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.now:9.3f} {who}: {text}")


@dataclass(frozen=True)
class HostClock:
    """The monotonic clock of a host: it began at another time than those of other hosts, and runs at its own rate."""

    loop: EventLoop
    offset: float
    rate: float

    def __call__(self) -> float:
        return self.offset + self.rate * self.loop.now

    def virtual(self, time: float) -> float:
        """The virtual time at which this clock shows `time`."""
        return (time - self.offset) / self.rate


class Process:
    """A process whose code is a generator: it runs in no time, and sleeps between."""

    def __init__(self, loop: EventLoop, clock: HostClock, body: Body, on_error: Callable[[BaseException], None]):
        self.loop, self.clock, self.body, self.on_error = loop, clock, body, on_error
        self.alive, self.paused = True, False
        self.missed = False
        """Whether it should have woken while it was paused."""
        self.wakes_on_message = False
        self.version = 0
        self.collects = 0.0
        """Seconds for which it lets messages arrive before it handles them."""
        self.backlog: list[Callable[[], None]] = []
        """What arrived while it was paused."""
        loop.after(0.0, self._resume, 0)

    def _resume(self, version: int) -> None:
        if version != self.version or not self.alive:
            return
        if self.paused:
            self.missed = True
            return
        self.wakes_on_message = self.missed = False
        self.version += 1
        try:
            deadline, self.wakes_on_message = next(self.body)
        except StopIteration:
            self.alive = False
        except ProcessKilled:
            self.alive = False
        except Exception as error:  # noqa: BLE001  a crash of the code under test is a finding
            self.alive = False
            self.on_error(error)
        else:
            self.loop.at(self.clock.virtual(deadline), self._resume, self.version)

    def poke(self) -> None:
        """A message has arrived, or something else that this process waits for has happened."""
        if self.wakes_on_message and self.alive:
            self.wakes_on_message = False
            self.version += 1
            self.loop.after(self.collects, self._resume, self.version)

    def receive(self, call: Callable[[], None]) -> None:
        """Runs `call` in a thread of this process: at once, or when it continues."""
        if self.paused:
            self.backlog.append(call)
        elif self.alive:
            call()

    def pause(self) -> None:
        self.paused = True

    def continue_(self) -> None:
        if not self.paused:
            return
        self.paused = False
        backlog, self.backlog = self.backlog, []
        for call in backlog:
            self.receive(call)
        if self.missed:
            self.loop.at(self.loop.now, self._resume, self.version)

    def kill(self) -> None:
        self.alive = False
        self.backlog = []
