"""Lists the checkpoints of a run: published, not fenced off, newest first. Torch-free.

The number of an attempt is its fencing epoch. An attempt that takes over a run records in its lease which checkpoints
exist; from then on only those and its own are valid. A checkpoint that an earlier attempt publishes later, because its
processes were still alive, is fenced off and never listed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.base.checkpoint.format.canonical import InvalidManifest, canonical_digest
from meshwright.base.checkpoint.format.index import CheckpointIndex, read_index, read_part
from meshwright.base.checkpoint.format.manifest_parts import ManifestPart
from meshwright.base.checkpoint.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest
from meshwright.base.io import MAX_JSON_BYTES
from meshwright.base.records.run_folder import RunFolder, parse_attempt
from meshwright.base.store.interface import Store
from meshwright.base.store.mirror import MirroredStore
from meshwright.base.store.posix import PosixStore
from meshwright.errors import CheckpointError

CHECKPOINTS_FOLDER = "checkpoints"
LEASE_FILE = "lease.json"
NAME_PATTERN = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})\.a([0-9]{4}|[1-9][0-9]{4,8})")
"""The names that `checkpoint_folder` gives, and no others: a number has one spelling."""


def checkpoint_folder(step: int, attempt: int) -> str:
    return f"{CHECKPOINTS_FOLDER}/step-{step:08d}.a{attempt:04d}"


@dataclass(frozen=True)
class CheckpointEntry:
    """A folder under checkpoints/. It is a checkpoint only if it has a manifest."""

    store: Store
    folder: str
    step: int
    attempt: int
    manifest: Manifest | None
    """The manifest, or None if there is no valid one."""
    problem: str = ""
    """Why the checkpoint cannot be used, '' if it can."""
    published: bool = True
    """Whether the folder has a manifest file, valid or not."""
    fenced: bool = False
    """Whether an attempt published the checkpoint after a later attempt had taken over the run."""

    @property
    def name(self) -> str:
        return self.folder.rpartition("/")[2]

    @property
    def was_deleted(self) -> bool:
        """Whether the manifest is gone by now. Retention deletes it first: a file that is missing then is no damage."""
        return self.store.size(f"{self.folder}/{MANIFEST_FILE}") is None

    def read_part(self, name: str) -> ManifestPart:
        """A part of the manifest. Raises OSError or InvalidManifest unless it is the one that was written."""
        assert self.manifest is not None
        return read_part(self.store, self.folder, self.manifest, name)

    @cached_property
    def index(self) -> CheckpointIndex:
        """Where the tensors are stored. The first use reads every part: a listing never does."""
        assert self.manifest is not None
        try:
            return read_index(self.store, self.folder, self.manifest)
        except InvalidManifest as problem:
            raise CheckpointError(f"checkpoint {self.name} is damaged: {problem}") from None


@dataclass(frozen=True)
class AttemptFence:
    """The checkpoints that the newest attempt accepts: its own, and those that existed when it took over the run."""

    attempt: int
    inherited: dict[str, str]
    """The digest of each inherited manifest, by the name of the checkpoint; '' if it could not be read."""

    def admits(self, entry: CheckpointEntry) -> bool:
        if entry.attempt >= self.attempt:  # of a later attempt with an unreadable lease the checkpoints are valid
            return True
        return entry.manifest is None or self.inherited.get(entry.name) in ("", entry.manifest.digest)


@dataclass(frozen=True)
class RunLineage:
    """The run and timeline, and which checkpoints precede its current state.

    A fork begins a new timeline at a checkpoint: later checkpoints of the earlier timeline do not belong to it.
    """

    run: str
    timeline: int
    last_steps: dict[int, int]
    """The last step that belongs to this lineage, of every earlier timeline."""

    def includes(self, entry: CheckpointEntry) -> bool:
        manifest = entry.manifest
        if manifest is None:
            return True
        if manifest.run != self.run:
            return False
        return manifest.timeline == self.timeline or entry.step <= self.last_steps.get(manifest.timeline, -1)

    @classmethod
    def from_identity(cls, identity: dict[str, Any]) -> RunLineage:
        """The lineage that identity.json records. Raises a ValueError, TypeError or AttributeError if it has none."""
        try:
            last_steps = {int(timeline): int(step) for timeline, step in identity.get("until", {}).items()}
            return cls(str(identity.get("run", "")), int(identity.get("timeline", 1)), last_steps)
        except OverflowError:  # JSON may contain Infinity
            raise ValueError("a number is not finite") from None


def open_run_store(folder: RunFolder) -> Store:
    """Where the checkpoints and leases of a run are: its folder, or the object store that the folder mirrors."""
    return MirroredStore(url, folder.root) if (url := folder.url) else PosixStore(folder.root)


def list_checkpoint_folders(store: Store) -> list[CheckpointEntry]:
    """Every checkpoint folder, newest first, including unpublished, invalid and fenced ones."""
    fence = read_fence(store)
    entries = []
    for name in store.list_names(CHECKPOINTS_FOLDER):
        if match := NAME_PATTERN.fullmatch(name):
            entry = read_entry(store, f"{CHECKPOINTS_FOLDER}/{name}", int(match[1]), int(match[2]))
            entries.append(entry if fence.admits(entry) else mark_fenced(entry, fence))
    return sorted(entries, key=lambda entry: (entry.step, entry.attempt), reverse=True)


def list_published(store: Store, lineage: RunLineage | None = None) -> list[CheckpointEntry]:
    """The published checkpoints that are not fenced off, newest first, including damaged ones."""
    entries = [entry for entry in list_checkpoint_folders(store) if entry.published and not entry.fenced]
    return entries if lineage is None else [entry for entry in entries if lineage.includes(entry)]


def read_entry(store: Store, folder: str, step: int, attempt: int) -> CheckpointEntry:
    """The entry of a checkpoint folder, with its manifest if that is valid."""
    path = f"{folder}/{MANIFEST_FILE}"
    try:
        size = store.size(path)
        if size is None:
            return CheckpointEntry(store, folder, step, attempt, None, "not published", published=False)
        if size > MAX_MANIFEST_BYTES:
            raise InvalidManifest(f"the manifest has {size:,} bytes, more than {MAX_MANIFEST_BYTES:,}")
        manifest = Manifest.decode(store.read(path, 0, size + 1))
        if (manifest.step, manifest.attempt) != (step, attempt):
            raise InvalidManifest(f"the manifest belongs to step {manifest.step}, attempt {manifest.attempt}")
    except FileNotFoundError:  # retention has deleted it since
        return CheckpointEntry(store, folder, step, attempt, None, "not published", published=False)
    except (InvalidManifest, OSError) as problem:
        return CheckpointEntry(store, folder, step, attempt, None, str(problem))
    return CheckpointEntry(store, folder, step, attempt, manifest)


def mark_fenced(entry: CheckpointEntry, fence: AttemptFence) -> CheckpointEntry:
    problem = f"published by attempt {entry.attempt} after attempt {fence.attempt} had taken over the run"
    return replace(entry, problem=problem, published=True, fenced=True)


def list_leases(store: Store) -> list[tuple[int, dict[str, Any]]]:
    """(attempt, lease) of every attempt that has acquired the run, newest first; an invalid lease does not count."""
    return [(attempt, lease) for attempt in list_attempts(store) if (lease := read_lease(store, attempt))]


def list_attempts(store: Store) -> list[int]:
    """The numbers of the attempts that have a folder, newest first."""
    return sorted(filter(None, map(parse_attempt, store.list_names("attempts"))), reverse=True)


def read_lease(store: Store, attempt: int) -> dict[str, Any] | None:
    """The lease of an attempt, or None if it is absent or fails its digest."""
    try:
        lease = json.loads(store.read(f"attempts/{attempt:04d}/{LEASE_FILE}", 0, MAX_JSON_BYTES))
        recorded = lease.pop("digest")
        valid = isinstance(lease["inherited"], dict) and type(lease["pid"]) is int and lease["pid"] > 0
        valid = valid and lease["attempt"] == attempt  # a copy of another attempt's folder is not an attempt
        return lease if valid and canonical_digest(lease) == recorded else None
    except FileNotFoundError:
        return None
    except OSError:
        if isinstance(store, PosixStore):
            return None
        raise  # an object store that does not answer does not say that there is no lease
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None


def read_fence(store: Store) -> AttemptFence:
    """The fence of the newest attempt with a valid lease."""
    for attempt in list_attempts(store):
        if lease := read_lease(store, attempt):
            return AttemptFence(attempt, lease["inherited"])
    return AttemptFence(0, {})
