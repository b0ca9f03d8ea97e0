"""Shows the progress of tokenization on standard error: a bar on a terminal, else lines of text. Torch-free."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

from meshwright.base.io import format_bytes, format_clock, format_count

LOG_SECONDS = 10.0


class Progress:
    """Counts what is done; `total` is the size of the inputs in bytes. Work of an earlier command has no rate."""

    def __init__(self, total: int, name: str = "tokenizing") -> None:
        self.total, self.name = max(total, 1), name
        self.bytes = self.tokens = self.resumed_bytes = self.resumed_tokens = 0
        self.start = self.shown = time.monotonic()
        self.bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def add(self, consumed: int, tokens: int, resumed: bool) -> None:
        self.bytes, self.tokens = self.bytes + consumed, self.tokens + tokens
        if resumed:
            self.resumed_bytes, self.resumed_tokens = self.resumed_bytes + consumed, self.resumed_tokens + tokens
        if resumed and self.bar is None:
            return
        if sys.stderr is not None and sys.stderr.isatty():
            self.draw()
        elif time.monotonic() - self.shown >= LOG_SECONDS:
            self.shown = time.monotonic()
            with suppress(OSError):
                print(f"{self.name}: {self.describe()}", file=sys.stderr, flush=True)

    def describe(self) -> str:
        seconds = max(time.monotonic() - self.start, 1e-9)
        rate = (self.tokens - self.resumed_tokens) / seconds
        speed = (self.bytes - self.resumed_bytes) / seconds
        left = f", {format_clock((self.total - self.bytes) / speed)} left" if speed > 0 else ""
        done = f"{format_bytes(self.bytes)} of {format_bytes(self.total)}"
        return f"{done}, {format_count(self.tokens)} tokens, {format_count(rate)} tokens/s{left}"

    def draw(self) -> None:
        """The bar appears with the first part that is done: workers are forked before rich starts its thread."""
        if self.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn(self.name), BarColumn(), TextColumn("{task.fields[text]}"))
            self.bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self.bar.add_task(self.name, total=self.total, text="")
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=self.bytes, text=self.describe())

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
