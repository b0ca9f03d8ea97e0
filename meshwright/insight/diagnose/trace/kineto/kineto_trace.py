"""The trace of one rank: its events, its steps, and what the header says about the job."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import ConfigError
from meshwright.insight.diagnose.trace.intervals import Intervals
from meshwright.insight.diagnose.trace.kineto.event_scanner import EventScanner
from meshwright.insight.diagnose.trace.kineto.event_table import EventTable, Kind, TableBuilder
from meshwright.insight.diagnose.trace.kineto.trace_file import TraceFile

STEP_NAME = re.compile(r"^ProfilerStep#(\d{1,15})$")
RANK_IN_NAME = re.compile(r"rank[-_ ]?0*(\d{1,7})(?!\d)", re.IGNORECASE)
EXPECTED = "expected a trace that torch.profiler exported: JSON with traceEvents, or the same with gzip"


@dataclass
class KinetoTrace:
    """The events of one rank and what is known about it."""

    path: Path
    events: EventTable
    header: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """what is missing from the trace"""

    @property
    def rank(self) -> int | None:
        """The rank that the header states, else the one in the name of the file."""
        rank = self.distributed.get("rank")
        if isinstance(rank, int) and 0 <= rank < 1 << 20:
            return rank
        in_name = RANK_IN_NAME.search(self.path.name)
        return int(in_name[1]) if in_name else None

    @property
    def distributed(self) -> dict[str, Any]:
        info = self.header.get("distributedInfo")
        return info if isinstance(info, dict) else {}

    @property
    def has_device(self) -> bool:
        return bool(self.events.is_device.any())

    @property
    def uses_device(self) -> bool:
        """Whether the program uses a device, as far as is known: it calls the runtime, other than to wait, as the
        profiler itself does. A program on Gloo without such calls computes on CPU, whatever devices the header lists.
        """
        backend = str(self.distributed.get("backend", ""))
        calls = (self.events.kind == Kind.RUNTIME) & ~self.events.named("Synchronize")
        return bool(calls.any() or (backend != "gloo" and (self.header.get("deviceProperties") or "nccl" in backend)))

    def steps(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], Intervals]:
        """The numbers and the times of the steps (`ProfilerStep#` annotations) in order."""
        events = self.events
        numbers = np.array([int(m[1]) if (m := STEP_NAME.match(name)) else -1 for name in events.names] or [-1])
        rows = np.flatnonzero((numbers[events.name] >= 0) & ~events.is_device)
        # A step is recorded once per thread at most; the longest one is that of the training thread.
        rows = rows[np.lexsort((-events.duration[rows], numbers[events.name[rows]]))]
        number, first = np.unique(numbers[events.name[rows]], return_index=True)
        rows = rows[first]
        order = np.argsort(events.start[rows])
        return number[order], Intervals(events.start[rows[order]], events.end[rows[order]])

    def host(self, pattern: str) -> Intervals:
        """The times at which the host is in an operator, annotation or runtime call whose name matches."""
        rows = self.events.named(pattern) & ~self.events.is_device
        return Intervals.union(self.events.start[rows], self.events.end[rows])


def read_trace(path: Path) -> KinetoTrace:
    """Reads a Kineto trace in bounded memory; a damaged one gives what can be read, with a note.

    A trace whose header lists devices but that has no device activity was recorded without them, and is read again with
    all operators of the host.
    """
    trace = scan(path, None)
    if not trace.has_device and trace.header.get("deviceProperties"):
        trace = scan(path, True)
    if not len(trace.events):
        reason = "; ".join(trace.notes) or "it has no operators, kernels or annotations"
        raise ConfigError(f"trace {path} has no events that can be diagnosed: {reason}", EXPECTED)
    return trace


def scan(path: Path, host_only: bool | None) -> KinetoTrace:
    """Scans one trace; the collectives of a host-only trace keep all operators."""
    builder = TableBuilder()
    scanner, file = EventScanner(builder, host_only), TraceFile(path)
    for chunk in file.chunks():
        scanner.feed(chunk)
        if scanner.is_done:
            break
    scanner.close()
    return KinetoTrace(path, builder.build(), parse_header(scanner.header or b""), file.notes + scanner.notes)


def parse_header(text: bytes) -> dict[str, Any]:
    """Parses the keys before the events; an empty dict if they are not JSON."""
    try:
        header = json.loads(text.decode("utf-8", "replace").rstrip().rstrip(",") + "}")
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}
