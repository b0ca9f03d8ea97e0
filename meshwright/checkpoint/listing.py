"""Which checkpoints a run has: published, not fenced off, newest first. Torch-free.

An attempt's number is its fencing epoch. Whoever takes a run over writes down, in its lease, which checkpoints it
found; from then on only those and its own exist. What an earlier holder still publishes when it comes back is listed
by nobody.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from meshwright.checkpoint.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    InvalidManifest,
    Manifest,
    canonical_digest,
)
from meshwright.io import MAX_JSON_BYTES
from meshwright.store.interface import Store
from meshwright.store.posix import PosixStore
from meshwright.telemetry.run_folder import RunFolder

CHECKPOINTS_FOLDER = "checkpoints"
LEASE_FILE = "lease.json"
NAME_PATTERN = re.compile(r"step-(\d{8,18})\.a(\d{4,9})")


def checkpoint_folder(step: int, attempt: int) -> str:
    return f"{CHECKPOINTS_FOLDER}/step-{step:08d}.a{attempt:04d}"


@dataclass(frozen=True)
class CheckpointEntry:
    """A folder under checkpoints/. Only one with a manifest is a checkpoint; `problem` says what is wrong with it."""

    store: Store
    folder: str
    step: int
    attempt: int
    manifest: Manifest | None
    problem: str = ""
    published: bool = True
    fenced: bool = False

    @property
    def name(self) -> str:
        return self.folder.rpartition("/")[2]


@dataclass(frozen=True)
class AttemptFence:
    """What the newest holder of the run accepts: its own attempt, and what it found when it took over."""

    attempt: int
    inherited: dict[str, str]
    """manifest digest by folder name"""

    def admits(self, entry: CheckpointEntry) -> bool:
        if entry.attempt >= self.attempt:  # of a newer one the lease is damaged: its checkpoints are none the worse
            return True
        return entry.manifest is None or self.inherited.get(entry.name) in ("", entry.manifest.digest)


@dataclass(frozen=True)
class RunLineage:
    """Which run this is, and which checkpoints lead up to where it stands: a fork leaves the rest of the timeline that
    it came from behind.
    """

    run: str
    timeline: int
    last_steps: dict[int, int]
    """the last step that counts, of every earlier timeline"""

    def includes(self, entry: CheckpointEntry) -> bool:
        if entry.manifest is None:
            return True
        own = entry.manifest.timeline == self.timeline
        return entry.manifest.run == self.run and (
            own or entry.step <= self.last_steps.get(entry.manifest.timeline, -1)
        )

    @classmethod
    def from_identity(cls, identity: dict[str, Any]) -> RunLineage:
        """As identity.json keeps it."""
        until = {int(timeline): int(step) for timeline, step in identity.get("until", {}).items()}
        return cls(str(identity.get("run", "")), int(identity.get("timeline", 1)), until)


def open_run_store(folder: RunFolder) -> PosixStore:
    return PosixStore(folder.root)


def list_checkpoint_folders(store: Store) -> list[CheckpointEntry]:
    """Every folder of a checkpoint, newest first, whatever became of it."""
    fence = read_fence(store)
    found = []
    for name in store.list_names(CHECKPOINTS_FOLDER):
        if match := NAME_PATTERN.fullmatch(name):
            entry = read_entry(store, f"{CHECKPOINTS_FOLDER}/{name}", int(match[1]), int(match[2]))
            found.append(entry if fence.admits(entry) else mark_fenced(entry, fence))
    return sorted(found, key=lambda entry: (entry.step, entry.attempt), reverse=True)


def list_published(store: Store, lineage: RunLineage | None = None) -> list[CheckpointEntry]:
    """The checkpoints of a run, newest first, damaged ones among them."""
    entries = [entry for entry in list_checkpoint_folders(store) if entry.published and not entry.fenced]
    return entries if lineage is None else [entry for entry in entries if lineage.includes(entry)]


def read_entry(store: Store, folder: str, step: int, attempt: int) -> CheckpointEntry:
    try:
        size = store.size(f"{folder}/{MANIFEST_FILE}")
        if size is None:
            return CheckpointEntry(store, folder, step, attempt, None, "never published", published=False)
        if size > MAX_MANIFEST_BYTES:
            raise InvalidManifest(f"the manifest has {size:,} bytes, over {MAX_MANIFEST_BYTES:,}")
        manifest = Manifest.decode(store.read(f"{folder}/{MANIFEST_FILE}", 0, size + 1))
        if (manifest.step, manifest.attempt) != (step, attempt):
            raise InvalidManifest(f"the manifest is that of step {manifest.step}, attempt {manifest.attempt}")
    except (InvalidManifest, OSError) as problem:
        return CheckpointEntry(store, folder, step, attempt, None, str(problem))
    return CheckpointEntry(store, folder, step, attempt, manifest)


def mark_fenced(entry: CheckpointEntry, fence: AttemptFence) -> CheckpointEntry:
    why = f"published by attempt {entry.attempt} after attempt {fence.attempt} had taken the run over"
    return CheckpointEntry(entry.store, entry.folder, entry.step, entry.attempt, entry.manifest, why, fenced=True)


def list_leases(store: Store) -> list[tuple[int, dict[str, Any]]]:
    """(attempt, lease) of every attempt that took the run, newest first; a torn one was never taken."""
    return [(attempt, lease) for attempt in list_attempts(store) if (lease := read_lease(store, attempt))]


def list_attempts(store: Store) -> list[int]:
    """The numbers of the attempts that have a folder, newest first."""
    names = store.list_names("attempts")
    return sorted((int(name) for name in names if re.fullmatch(r"[0-9]{4,9}", name)), reverse=True)


def read_lease(store: Store, attempt: int) -> dict[str, Any] | None:
    try:
        values = json.loads(store.read(f"attempts/{attempt:04d}/{LEASE_FILE}", 0, MAX_JSON_BYTES))
        said = values.pop("digest")
        sane = isinstance(values["inherited"], dict) and type(values["pid"]) is int and values["pid"] > 0
        return values if sane and canonical_digest(values) == said else None
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None


def read_fence(store: Store) -> AttemptFence:
    for attempt in list_attempts(store):
        if lease := read_lease(store, attempt):
            return AttemptFence(attempt, lease["inherited"])
    return AttemptFence(0, {})
