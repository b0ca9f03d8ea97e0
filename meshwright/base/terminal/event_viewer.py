"""Passes the events of a running attempt to a display. Torch-free."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from meshwright.base.records.events import EventFollower
from meshwright.base.terminal.terminal import EventDisplay


class EventViewer:
    """Passes the events of rank 0 to a display as they are written; `on_tick` is called with every look at them."""

    def __init__(
        self, display: EventDisplay, events: EventFollower, on_tick: Callable[[], None] = lambda: None
    ) -> None:
        self.display, self.events, self.on_tick = display, events, on_tick

    def tick(self) -> None:
        self.on_tick()
        for event in self.events.new_events():
            self.show(event)

    def show(self, event: dict[str, Any]) -> None:
        try:
            self.display.show(event)
        except (OSError, SystemExit):  # the reader of the pipe has gone (rich exits in that case); training continues
            self.display = SilentDisplay()
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        self.display.close()


class SilentDisplay:
    """A display that shows nothing."""

    def show(self, event: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
