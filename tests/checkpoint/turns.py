"""Several ranks in one process, one at a time, changing at their disk calls as a seed decides."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable


class Turns:
    """Lets threads run one at a time, changing at their disk calls as a seed decides."""

    def __init__(self, seed: int) -> None:
        self.rng, self.changed = random.Random(seed), threading.Condition()
        self.place: dict[int, int] = {}
        self.left: set[int] = set()
        self.now = -1

    def run(self, works: list[Callable], disk) -> list:
        """What each gives; the first failure, once all have ended."""
        ended: dict[int, object] = {}
        failed: list[BaseException] = []

        def thread(index: int) -> None:
            with self.changed:
                self.place[threading.get_ident()] = index
                self.left.add(index)
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.now == index)
            try:
                ended[index] = works[index]()
            except BaseException as failure:  # noqa: BLE001
                failed.append(failure)
            with self.changed:
                self.left.discard(index)
                self._next()

        threads = [threading.Thread(target=thread, args=(index,)) for index in range(len(works))]
        disk.turn = self.change
        for one in threads:
            one.start()
        with self.changed:
            self.changed.wait_for(lambda: len(self.left) == len(works))
            self._next()
        for one in threads:
            one.join()
        disk.turn = lambda: None
        if failed:
            raise failed[0]
        return [ended[index] for index in range(len(works))]

    def change(self) -> None:
        with self.changed:
            me = self.place[threading.get_ident()]
            self._next()
            self.changed.wait_for(lambda: self.now == me)

    def _next(self) -> None:
        if self.left:
            self.now = self.rng.choice(sorted(self.left))
            self.changed.notify_all()
