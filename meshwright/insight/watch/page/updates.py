"""Sends the newest snapshot of every run to any number of readers as server-sent events. Torch-free.

One task per run makes the snapshots, while there are readers. A reader has no queue: when it can take something, it
gets the newest snapshot of each run, so that a slow one skips snapshots and costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from meshwright.errors import MeshwrightError
from meshwright.insight.watch.page.watched_run import WatchedRun

RUNNING_SECONDS, ENDED_SECONDS = 1.0, 5.0
"""Seconds between two snapshots of a run that trains, and of one that does not."""
MAX_LOAD = 0.1
"""The share of a processor that making the snapshots of one run may take."""
SILENCE_SECONDS = 15.0
"""After this time without news a reader gets a comment, so that a broken connection is noticed."""


class Updates:
    """The newest snapshots, and the readers that wait for the next ones."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self._runs = runs
        self._newest: dict[int, tuple[int, bytes]] = {}
        self._readers: set[asyncio.Event] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="meshwright-snapshot")

    @property
    def readers(self) -> int:
        return len(self._readers)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yields the events for one reader, until it goes."""
        news, sent = asyncio.Event(), dict.fromkeys(range(len(self._runs)), 0)
        self._readers.add(news)
        try:
            self._start()
            yield b"retry: 2000\n\n"
            while True:
                news.clear()
                for number, (version, snapshot) in list(self._newest.items()):
                    if version > sent[number]:
                        sent[number] = version
                        yield b"event: run\ndata: " + snapshot + b"\n\n"
                try:
                    await asyncio.wait_for(news.wait(), SILENCE_SECONDS)
                except TimeoutError:
                    yield b": no news\n\n"
        finally:
            self._readers.discard(news)

    def _start(self) -> None:
        """Starts the task of every run unless it runs already."""
        for run in self._runs:
            if run.number not in self._tasks or self._tasks[run.number].done():
                self._tasks[run.number] = asyncio.create_task(self._produce(run))

    async def _produce(self, run: WatchedRun) -> None:
        """Makes the snapshots of one run until the last reader has gone."""
        loop = asyncio.get_running_loop()
        while self._readers:
            begin = time.perf_counter()
            version, newest = self._newest.get(run.number, (0, b""))
            try:
                snapshot = await loop.run_in_executor(self._pool, run.snapshot)
            except MeshwrightError:  # the folder is gone; it may come back
                snapshot = newest
            if snapshot != newest:
                self._newest[run.number] = (version + 1, snapshot)
                for reader in self._readers:
                    reader.set()
            pause = RUNNING_SECONDS if run.is_alive else ENDED_SECONDS
            await asyncio.sleep(max(pause, (time.perf_counter() - begin) / MAX_LOAD))
