"""Saves snapshots beside training: which step has one, and what happens if one fails."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshwright.base.records.events import EventLog
from meshwright.core.checkpoint.saver import CheckpointMetadata, CheckpointSaver, SaveResult
from meshwright.core.store.memory.peer_store import PeerMemoryStore


class SnapshotSchedule:
    """The snapshots of a run on one rank; none without a store. They use the stager and the thread of the saver: one
    save or snapshot is in flight at a time. A snapshot that fails is reported and never ends the training.
    """

    def __init__(
        self,
        store: PeerMemoryStore | None,
        saver: CheckpointSaver,
        log: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.saver, self.log, self.clock = store, saver, log, clock
        self.every = saver.config.memory_every if store is not None and len(store.hosts) > 1 else 0
        self.overhead = saver.config.overhead
        self.next_begin = 0.0
        """When the next snapshot may begin: their stalls take at most a fraction of the training time."""
        self.skipped = 0
        self.failed = False
        """Whether the last snapshot has failed, which is reported once."""

    def poll(self, step: int) -> tuple[bool, bool, bool]:
        """What `CheckpointSaver.poll` says, and whether a snapshot is due after `step` steps. Only the answer of rank 0
        counts, so that all ranks act at the same step.
        """
        return *self.saver.poll(step), self.due(step)

    def due(self, step: int) -> bool:
        """Whether a snapshot is due after `step` steps, and nothing is in flight."""
        stager = self.saver.stager
        if not self.every or step % self.every or step == self.saver.newest_step or stager is None:
            return False
        if self.saver.is_saving or self.clock() < self.next_begin or not stager.ready():
            self.skipped += 1
            return False
        return True

    def save(self, metadata: CheckpointMetadata, in_memory: bool) -> list[SaveResult]:
        """Begin a snapshot or a checkpoint; returns the results of the saves that are complete."""
        if not in_memory:
            return self.saver.save(metadata)
        results = self.saver.save(metadata, memory=self.store)
        self.next_begin = self.clock() + self.saver.stall_seconds / self.overhead
        return results

    def report_incomplete(self, step: int, reason: str) -> None:
        """Reports a snapshot that the hosts that are left do not have in full."""
        self.log.write("snapshot_failed", step=step, message=f"the snapshot of step {step} is incomplete: {reason}")

    def record(self, results: list[SaveResult]) -> list[SaveResult]:
        """Records the results of snapshots, and returns those of checkpoints."""
        for result in results:
            if result.in_memory:
                self._record(result)
        return [result for result in results if not result.in_memory]

    def _record(self, result: SaveResult) -> None:
        if result.error is not None:
            if not self.failed:
                self.log.write("snapshot_failed", step=result.step, message=str(result.error))
            self.failed = True
            return
        self.failed = False
        seconds = {"stall_seconds": round(result.stall_seconds, 4), "seconds": round(result.seconds, 4)}
        self.log.write("snapshot", step=result.step, bytes=result.bytes, skipped=self.skipped, **seconds)
        self.skipped = 0
