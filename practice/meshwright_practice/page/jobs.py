"""Runs the experiments that the page asks for: one at a time, with a bounded queue. Torch-free."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from meshwright_practice.cards.card import Card, KnobValue
from meshwright_practice.cards.reviews import Answers, complete_review
from meshwright_practice.cards.runner import ExperimentRunner
from meshwright_practice.cards.schedule import Clock
from meshwright_practice.page.descriptions import describe_review, describe_run

MAX_WAITING = 4
"""Experiments that wait for their turn; more are refused."""
MAX_KEPT = 32
"""Results that are kept for a page that asks again."""
MAX_MESSAGES = 16
"""Messages about the progress file that are kept; the oldest are dropped."""


class QueueFull(Exception):
    """There are too many experiments already."""


@dataclass
class ExperimentJob:
    """One experiment that the page has started; with `answers` it is a review."""

    number: int
    card: Card
    knobs: Mapping[str, KnobValue]
    answers: Answers | None
    state: str = "waiting"
    """waiting, running or done"""
    seconds: float = 0.0
    bytes: int = 0
    result: dict[str, Any] | None = None
    version: int = field(default=0)
    """counts the changes, for readers that wait for news"""

    def update(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.version += 1

    def to_json(self) -> dict[str, Any]:
        fields = {"run": self.number, "card": self.card.id, "state": self.state}
        return fields | {"seconds": self.seconds, "bytes": self.bytes, "result": self.result}


class ExperimentJobs:
    """A thread that runs jobs in the order in which they arrive. It lives as long as the process: the server of
    experiments ends with the thread that has started it.
    """

    def __init__(self, runner: ExperimentRunner, path: Path, clock: Clock) -> None:
        self.runner, self.path, self.clock = runner, path, clock
        self._waiting: queue.Queue[ExperimentJob | None] = queue.Queue(MAX_WAITING)
        self._jobs: OrderedDict[int, ExperimentJob] = OrderedDict()
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="meshwright-experiments", daemon=True)
        self.messages: deque[str] = deque(maxlen=MAX_MESSAGES)
        """what happened to the progress file, for the page"""

    def start(self) -> None:
        self._thread.start()

    def submit(self, card: Card, knobs: Mapping[str, KnobValue], answers: Answers | None) -> ExperimentJob:
        with self._lock:
            job = ExperimentJob(next(self._numbers), card, knobs, answers)
            try:
                self._waiting.put_nowait(job)
            except queue.Full:
                raise QueueFull from None
            self._jobs[job.number] = job
            while len(self._jobs) > MAX_KEPT:
                self._jobs.popitem(last=False)
        return job

    def find(self, number: int) -> ExperimentJob | None:
        with self._lock:
            return self._jobs.get(number)

    def stop(self) -> None:
        """Ends the running experiment and the thread."""
        self.runner.interrupt()
        while self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=0.1)
                break
            except queue.Full:
                self._waiting.get_nowait()
        self._thread.join(timeout=10)
        self.runner.close()

    def _work(self) -> None:
        self.runner.start()
        while (job := self._waiting.get()) is not None:
            job.update(state="running")
            try:
                job.update(result=self._run(job), state="done")
            except Exception as error:  # noqa: BLE001  the page shows it, and the next job runs
                job.update(result={"failure": f"{type(error).__name__}: {error}"}, state="done")

    def _run(self, job: ExperimentJob) -> dict[str, Any]:
        def progress(seconds: float, used: int) -> None:
            job.update(seconds=seconds, bytes=used)

        run = self.runner.run(job.card.experiment, job.knobs, progress)
        if job.answers is None:
            return describe_run(job.card, run)
        reviewed = complete_review(job.card, job.answers, run, self.path, self.clock(), self.messages.append)
        return describe_review(reviewed, self.clock())
