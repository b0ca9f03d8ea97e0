"""Which checkpoints stay: the newest few that verify, every Kth, and nothing is deleted before they do. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from meshwright import faults
from meshwright.checkpoint.listing import CheckpointEntry, RunLineage, list_checkpoint_folders, read_fence
from meshwright.checkpoint.manifest import MANIFEST_FILE
from meshwright.checkpoint.verify import find_damage
from meshwright.store.interface import Store


class RetentionPolicy:
    """Applied after each publication, by the one process that publishes."""

    def __init__(self, store: Store, attempt: int, keep: int, keep_every: int, lineage: RunLineage) -> None:
        self.store, self.attempt, self.keep, self.keep_every = store, attempt, keep, keep_every
        self.lineage = lineage
        self.verified: set[str] = set()

    def apply(self, progress: Callable[[], None] = lambda: None) -> list[str]:
        """Deletes what may go and gives its names; nothing goes unless `keep` newer ones verify. What cannot be deleted
        stays for the next time, and is raised at the end.
        """
        entries = list_checkpoint_folders(self.store)
        listed = [entry for entry in entries if entry.published and not entry.fenced and self.lineage.includes(entry)]
        kept = 0
        cut = len(listed)
        for index, entry in enumerate(listed):
            kept += self._verifies(entry, progress)
            if kept == self.keep:
                cut = index + 1
                break
        gone = [entry for entry in listed[cut:] if not self._for_good(entry)]
        # What earlier attempts never published was never part of the run; nor was what they published too late, which
        # all the same goes only where enough is left.
        late = kept >= self.keep
        gone += [e for e in entries if e.attempt < self.attempt and (not e.published or (e.fenced and late))]
        deleted, trouble = [], None
        for entry in gone:
            if read_fence(self.store).attempt > self.attempt:
                break  # another has taken the run over: what goes is its to say
            try:
                self.delete(entry)
                deleted.append(entry.name)
            except OSError as error:
                trouble = error
        if trouble is not None:
            raise trouble
        return deleted

    def _verifies(self, entry: CheckpointEntry, progress: Callable[[], None]) -> bool:
        if entry.name not in self.verified and not find_damage(entry, progress=progress):
            self.verified.add(entry.name)
        return entry.name in self.verified

    def _for_good(self, entry: CheckpointEntry) -> bool:
        return bool(self.keep_every and entry.manifest and entry.manifest.ordinal % self.keep_every == 0)

    def delete(self, entry: CheckpointEntry) -> None:
        """Withdraws a checkpoint first, durably; its files follow."""
        if entry.published:
            self.store.remove(f"{entry.folder}/{MANIFEST_FILE}")
        faults.fail_point("retain.unpublished", entry.step)
        self.store.remove_folder(entry.folder)
        self.verified.discard(entry.name)
