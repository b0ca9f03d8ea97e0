"""Passes the records of a rank to its callbacks, and keeps them from changing or ending the run."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from meshwright.base.records.events import Event, EventLog
from meshwright.base.records.heartbeat import Heartbeat
from meshwright.core.trainer.callbacks.callback import HOOKS, Callback, RunContext
from meshwright.core.trainer.callbacks.hooks import CallHook
from meshwright.core.trainer.callbacks.incidents import mark_reported, unreported_incidents


class CallbackDispatcher:
    """The listener of a rank's event log. Records before `begin` wait until the run has restored its checkpoint."""

    def __init__(self, callbacks: Sequence[Callback], run: RunContext, heartbeat: Heartbeat) -> None:
        self.callbacks = [callback for callback in callbacks if run.rank == 0 or callback.every_rank]
        self.run, self.heartbeat = run, heartbeat
        self.waiting: list[Event] | None = []

    def listener(self, display: Callable[[Event], None] | None) -> Callable[[Event], None]:
        """The listener of an event log, which shows a record first if there is a display in this process."""
        if display is None:
            return self.receive

        def show_and_receive(record: Event) -> None:
            display(record)
            self.receive(record)

        return show_and_receive

    def receive(self, record: Event) -> None:
        """Calls the hook of every callback with a copy of the record."""
        if not self.callbacks or record["kind"] not in HOOKS:
            return
        if self.waiting is not None:
            self.waiting.append(record)
            return
        phase = self.heartbeat.phase
        self.heartbeat.enter("callback")
        for callback in self.callbacks:
            with unchanged_state():
                self.call_hook(callback, copy.deepcopy(record), self.run)
        self.heartbeat.enter(phase)

    def begin(self, first_step: int, log: EventLog) -> None:
        """Delivers the incidents that no attempt has delivered, then the records that have waited."""
        self.run.first_step = first_step
        self.call_hook = CallHook(lambda **failure: log.write("callback_failed", **failure))
        waiting, self.waiting = self.waiting or [], None
        if self.callbacks and self.run.rank == 0:
            for attempt, incident in unreported_incidents(self.run.folder, self.run.attempt):
                self.receive(incident)
                mark_reported(self.run.folder, attempt)
        for record in waiting:
            self.receive(record)

    def take_save_request(self) -> bool:
        """Whether a callback has asked for a checkpoint since the last call."""
        requested, self.run.save_requested = self.run.save_requested, False
        return requested


@contextmanager
def unchanged_state() -> Iterator[None]:
    """Restores the global state of torch, numpy and random that numbers depend on."""
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    dtype, grad, threads = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    deterministic, matmul = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_rng_state(generators[2])
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.set_float32_matmul_precision(matmul)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)
