"""Finds the snapshots in the memory of the hosts from which a run may continue."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshwright.base.checkpoint.listing import CheckpointEntry, RunLineage, list_published
from meshwright.core.parallel.world import World
from meshwright.core.store.memory.peer_store import KEPT, PeerMemoryStore


class RestoreCandidate(NamedTuple):
    """A checkpoint or a snapshot that a run may continue from."""

    folder: str
    step: int
    attempt: int
    hosts: list[str] = []  # noqa: RUF012
    """The hosts that have the files of a snapshot; none for a published checkpoint."""

    def order(self) -> tuple[int, bool, int]:
        """The newest step is the greatest; of the same step, a published checkpoint is preferred."""
        return self.step, not self.hosts, self.attempt


def find_snapshots(
    memory: PeerMemoryStore,
    world: World,
    lineage: RunLineage,
    published: list[CheckpointEntry],
    on_incomplete: Callable[[int, str], None],
) -> list[RestoreCandidate]:
    """The complete snapshots of this run, the same list on every rank. One that is not complete on the hosts that are
    left is told to `on_incomplete` on rank 0. Only rank 0 needs the `published` checkpoints.
    """
    memory.use(world.broadcast_object(memory.collect() if world.rank == 0 else None, "files in memory"))
    found = []
    for entry in list_published(memory, lineage) if world.rank == 0 else []:
        if entry.manifest is None or not follows(entry, published):
            continue
        parts = entry.manifest.parts
        files = [f"{entry.folder}/{name}" for part in parts for name in (parts[part].file, part)]
        missing = [name for name in files if memory.size(name) is None]
        if not missing:
            found.append((entry.folder, entry.step, entry.attempt, memory.hosts_of(files)))
            continue
        lost = "".join(f"; {host}: {reason}" for host, reason in sorted(memory.unreachable.items()))
        shown = missing[0].rpartition("/")[2]
        on_incomplete(entry.step, f"{len(missing)} of {len(files)} files are on no host that is left ({shown}){lost}")
    memory.kept = [folder for folder, *_ in found][:KEPT]
    return [RestoreCandidate(*values) for values in world.broadcast_object(found, "snapshots")]


def follows(snapshot: CheckpointEntry, published: list[CheckpointEntry]) -> bool:
    """Whether a snapshot continues the newest published checkpoint before it. A later attempt may have gone back and
    published others since: the snapshot is then not part of the history of the run.
    """
    assert snapshot.manifest is not None
    before = next((entry for entry in published if entry.step <= snapshot.step), None)
    if before is None or before.manifest is None:  # unreadable: the snapshot may be all that is left
        return before is not None or not snapshot.manifest.parent
    return before.manifest.digest == snapshot.manifest.parent
