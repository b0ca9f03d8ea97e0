"""Deletes old checkpoints: the newest few that verify and every Nth are kept. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.base.checkpoint.listing import CheckpointEntry, RunLineage, list_checkpoint_folders, read_fence
from meshwright.base.checkpoint.manifest import MANIFEST_FILE
from meshwright.base.store.interface import Store
from meshwright.core import faults
from meshwright.core.checkpoint.verify import DIGEST_THREADS, find_damage


class RetentionPolicy:
    """Applied after each publication by the process that publishes."""

    def __init__(self, store: Store, attempt: int, keep: int, keep_every: int, lineage: RunLineage) -> None:
        self.store, self.attempt, self.keep, self.keep_every = store, attempt, keep, keep_every
        self.lineage = lineage
        self.kept_steps: frozenset[int] = frozenset()
        """Checkpoints after these numbers of steps are kept whatever their age."""
        self.verified: set[str] = set()
        """The names of the checkpoints that this process has verified."""

    def apply(self, progress: Callable[[], None] = lambda: None) -> list[str]:
        """Delete expired checkpoints and return their names.

        A checkpoint expires only if `keep` newer ones verify. If a deletion fails, the others still run, and the
        error is raised at the end; the next call tries again.
        """
        entries = list_checkpoint_folders(self.store)
        listed = [entry for entry in entries if entry.published and not entry.fenced and self.lineage.includes(entry)]
        intact = 0
        first_expired = len(listed)
        for index, entry in enumerate(listed):
            intact += self._verifies(entry, progress)
            if intact == self.keep:
                first_expired = index + 1
                break
        expired = [entry for entry in listed[first_expired:] if not self._is_permanent(entry)]
        # What earlier attempts left unpublished was never a checkpoint. What they published after they were fenced off
        # is not one either, but it is deleted only once enough intact checkpoints exist.
        enough = intact >= self.keep
        expired += [e for e in entries if e.attempt < self.attempt and (not e.published or (e.fenced and enough))]
        deleted, failure = [], None
        for entry in expired:
            if read_fence(self.store).attempt > self.attempt:
                break  # a later attempt has taken over the run, and only it may delete
            try:
                self.delete(entry)
                deleted.append(entry.name)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
        return deleted

    def _verifies(self, entry: CheckpointEntry, progress: Callable[[], None]) -> bool:
        if entry.name not in self.verified and not find_damage(entry, progress=progress, threads=DIGEST_THREADS):
            self.verified.add(entry.name)
        return entry.name in self.verified

    def _is_permanent(self, entry: CheckpointEntry) -> bool:
        if entry.step in self.kept_steps:
            return True
        return bool(self.keep_every and entry.manifest and entry.manifest.ordinal % self.keep_every == 0)

    def delete(self, entry: CheckpointEntry) -> None:
        """Delete the manifest first, durably, then the other files: a crash in between leaves no partial checkpoint."""
        if entry.published:
            self.store.remove(f"{entry.folder}/{MANIFEST_FILE}")
        faults.fail_point("retain.unpublished", entry.step)
        self.store.remove_folder(entry.folder)
        self.verified.discard(entry.name)
