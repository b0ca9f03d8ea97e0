"""A deterministic scheduler of threads: several simulated ranks interleave at their disk calls by a seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable


class ThreadScheduler:
    """Runs threads one at a time and switches between them at their disk calls; a seed determines the order."""

    def __init__(self, seed: int) -> None:
        self.rng, self.changed = random.Random(seed), threading.Condition()
        self.index_by_thread: dict[int, int] = {}
        self.running: set[int] = set()
        self.active = -1

    def run(self, tasks: list[Callable], disk) -> list:
        """The results of all tasks; raises the first failure once all tasks have ended."""
        results: dict[int, object] = {}
        failures: list[BaseException] = []

        def run_task(index: int) -> None:
            with self.changed:
                self.index_by_thread[threading.get_ident()] = index
                self.running.add(index)
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.active == index)
            try:
                results[index] = tasks[index]()
            except BaseException as failure:  # noqa: BLE001
                failures.append(failure)
            with self.changed:
                self.running.discard(index)
                self._activate_next()

        threads = [threading.Thread(target=run_task, args=(index,)) for index in range(len(tasks))]
        disk.before_call = self.switch
        for thread in threads:
            thread.start()
        with self.changed:
            self.changed.wait_for(lambda: len(self.running) == len(tasks))
            self._activate_next()
        for thread in threads:
            thread.join()
        disk.before_call = lambda: None
        if failures:
            raise failures[0]
        return [results[index] for index in range(len(tasks))]

    def switch(self) -> None:
        with self.changed:
            index = self.index_by_thread[threading.get_ident()]
            self._activate_next()
            self.changed.wait_for(lambda: self.active == index)

    def _activate_next(self) -> None:
        if self.running:
            self.active = self.rng.choice(sorted(self.running))
            self.changed.notify_all()
