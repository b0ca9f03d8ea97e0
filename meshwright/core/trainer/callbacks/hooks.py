"""Calls one hook of a callback; an exception is reported once per callback and never ends the run. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable

from meshwright.base.records.events import Event
from meshwright.core.trainer.callbacks.callback import HOOKS, Callback, RunContext
from meshwright.errors import describe_exception, user_location


class CallHook:
    """Calls hooks. `report` gets the first failure of each callback as the fields of a `callback_failed` record."""

    def __init__(self, report: Callable[..., None]) -> None:
        self.report = report
        self.failed: set[int] = set()

    def __call__(self, callback: Callback, record: Event, run: RunContext) -> None:
        hook, process = HOOKS[record["kind"]], os.getpid()
        try:
            getattr(callback, hook)(record, run)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a user's code may raise anything
            if id(callback) in self.failed or os.getpid() != process:
                return
            self.failed.add(id(callback))
            where = user_location(error)
            text = " ".join(describe_exception(error).split())
            message = f"{type(error).__name__}: {text}" + (f" ({where})" if where else "")
            self.report(step=record.get("step"), callback=name_of(callback), hook=hook, message=message)
        finally:
            if os.getpid() != process:  # a process that the callback has forked must not continue as this rank
                os._exit(0)


def name_of(callback: Callback) -> str:
    """The name of a callback; a user's `name` may itself fail."""
    try:
        return str(callback.name)
    except Exception:  # noqa: BLE001
        return type(callback).__name__
