"""Splits the text of a trace into events, chunk by chunk, tolerating damage."""

from __future__ import annotations

import json
import re
from typing import Any

from meshwright.insight.diagnose.trace.kineto.event_pattern import (
    COMMUNICATION,
    COMPLETE_EVENT,
    DEVICE_TRACE,
    HOST_TRACE,
    event_pattern,
)
from meshwright.insight.diagnose.trace.kineto.event_table import Row, TableBuilder

MAX_HEADER = 8 << 20
"""Bytes before the events."""
MAX_EVENT = 4 << 20
"""Bytes of one event."""
MAX_MALFORMED = 1000
"""Malformed events after which the rest of a trace is not read."""
ENOUGH_EVENTS = 8
"""Complete events from which the layout of a trace is known."""
CHECK_EVERY = 64
"""Chunks between two checks that all events have Kineto's layout."""
EVENTS = re.compile(rb'"traceEvents"\s*+:\s*+\[')
BARE_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*+\[")
EVENT_START = re.compile(r'\{\s*+"(?:ph|name|cat|pid|tid|ts|dur)"\s*+:')
GAP = re.compile(r"[\s,]*+")


class EventScanner:
    """Adds the events of a trace to a TableBuilder; `feed` takes its text in chunks and `close` its end.

    Args:
        builder: receives the events that the diagnosis uses.
        host_only: keep every operator of the host, for a trace without a device. By default the header decides.
    """

    def __init__(self, builder: TableBuilder, host_only: bool | None = None) -> None:
        self.builder = builder
        self.host_only = host_only
        self.header: bytes | None = None
        """text before the events; None until they are found"""
        self.text = b""
        """what was fed and is not yet scanned"""
        self.chunks = self.malformed = 0
        self.has_kineto_layout: bool | None = None
        """None until enough events are seen"""
        self.is_complete = False
        """whether the end of the events was found"""
        self.notes: list[str] = []

    @property
    def is_done(self) -> bool:
        """Whether no more text is needed."""
        return self.is_complete or self.malformed > MAX_MALFORMED or self.builder.is_full or bool(self.notes)

    def feed(self, chunk: bytes) -> None:
        self.text += chunk
        if self.header is None and not self.find_events():
            return
        if self.has_kineto_layout is None and self.text.count(b'"X"') >= ENOUGH_EVENTS:
            self.has_kineto_layout = True  # until a check fails
        if self.has_kineto_layout:
            self.scan_kineto()
        elif self.has_kineto_layout is False or len(self.text) > MAX_EVENT // 4:
            self.scan_json()
        if len(self.text) > MAX_EVENT and not self.is_done:
            self.notes.append(f"an event after {self.builder.rows:,} events is longer than {MAX_EVENT >> 20} MiB")

    def find_events(self) -> bool:
        """Looks for the start of the events, and keeps what precedes it."""
        start = EVENTS.search(self.text) or BARE_ARRAY.match(self.text)
        if start is None:
            if len(self.text) > MAX_HEADER:
                self.notes.append(f"no traceEvents in the first {MAX_HEADER >> 20} MiB")
            return False
        self.header, self.text = self.text[: start.start()], self.text[start.end() :]
        if self.host_only is None:
            self.host_only = re.search(rb'"deviceProperties"\s*+:\s*+\[\s*+\{', self.header) is None
        self.wanted = HOST_TRACE if self.host_only else DEVICE_TRACE
        self.pattern = event_pattern(self.wanted)
        self.is_wanted = re.compile(self.wanted).match
        return True

    def scan_kineto(self) -> None:
        """Scans all events but the last, which the next chunk may complete."""
        end = self.text.rfind(b"{", 0, max(self.text.rfind(b'"ph"'), 0))
        if end < 0:
            return
        if self.chunks % CHECK_EVERY == 0:
            complete = sum(1 for _ in COMPLETE_EVENT.finditer(self.text, 0, end))
            self.has_kineto_layout = complete == self.text.count(b'"X"', 0, end)
            if not self.has_kineto_layout:
                self.scan_json()
                return
        self.chunks += 1
        self.builder.add(self.pattern.findall(self.text, 0, end))
        self.text = self.text[end:]

    def scan_json(self, is_end: bool = False) -> None:
        """Parses whole events as JSON, and keeps the rest. After a malformed event it goes on with the next one."""
        text, position, found = self.text.decode("latin-1"), 0, []
        while not self.is_done:
            start = GAP.match(text, position).end()  # type: ignore[union-attr]
            if start == len(text) or text[start] == "]":
                self.is_complete = start < len(text)
                break
            try:
                event, position = DECODER.raw_decode(text, start)
            except (ValueError, RecursionError):
                following = EVENT_START.search(text, start + 1)
                if following is None or (len(text) - start <= MAX_EVENT // 4 and not is_end):
                    break  # it may be incomplete
                self.malformed += 1
                position = following.start()
            else:
                row = json_row(event) if isinstance(event, dict) else None
                if row is not None and self.is_wanted(row[0] + b'", "name": "' + row[1]):
                    found.append(row)
        self.builder.add(found)
        self.text = self.text[position:]

    def close(self) -> None:
        """Scans what is left after the last chunk, and notes what is missing."""
        if self.header is None:
            self.notes = self.notes or ["it has no traceEvents"]
            return
        if not self.is_done:
            self.scan_json(is_end=True)
        if self.builder.is_full:
            self.notes.append(f"only the first {self.builder.rows:,} events are used")
        elif self.malformed > MAX_MALFORMED:
            self.notes.append(f"more than {MAX_MALFORMED:,} events are malformed; the rest is not read")
        elif not self.notes:
            if self.malformed:
                self.notes.append(f"{self.malformed:,} malformed events are left out")
            if not self.is_complete:
                self.notes.append(f"the trace is truncated after {self.builder.rows:,} events")
        if self.builder.invalid:
            self.notes.append(f"{self.builder.invalid:,} events with impossible times are left out")


DECODER = json.JSONDecoder(strict=False)


def json_row(event: dict[str, Any]) -> Row | None:
    """Returns a complete event as a row; None for another phase, such as metadata or a flow."""
    if event.get("ph") != "X":
        return None
    category, name, process, thread = (encoded(event.get(key, "")) for key in ("cat", "name", "pid", "tid"))
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    correlation = args.get("correlation")
    is_known = type(correlation) is int and 0 <= correlation < 1 << 63
    is_collective = "Collective name" in args or re.match(COMMUNICATION, name) is not None
    return (
        category,
        name,
        b"",
        process,
        thread,
        time_text(event.get("ts")),
        time_text(event.get("dur", 0)),
        str(correlation).encode() if is_known else b"",
        json.dumps(args).encode() if is_collective else b"",
    )


def encoded(value: Any) -> bytes:
    """A value as it is between the quotes of a JSON string; the text was decoded as Latin-1."""
    text = value if isinstance(value, str) else str(value)[:64]
    return text.replace("\\", "\\\\").replace('"', '\\"').encode("latin-1", "replace")


def time_text(value: Any) -> bytes:
    """A time as text that `float` accepts; NaN if it is not a number."""
    if isinstance(value, str) and len(value) < 64:
        try:
            value = float(value)
        except ValueError:
            return b"nan"
    return repr(value).encode() if type(value) in (int, float) else b"nan"  # a bool is an int as well
