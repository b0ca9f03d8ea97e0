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

from meshwright.checkpoint.manifest import LARGEST, NAME, Damaged, Manifest, digest_of
from meshwright.io import MAX_JSON_BYTES
from meshwright.store.posix import PosixStore, Store
from meshwright.telemetry.run_folder import RunFolder

FOLDER = "checkpoints"
LEASE = "lease.json"
SPELLING = re.compile(r"step-(\d{8,18})\.a(\d{4,9})")


def folder_of(step: int, attempt: int) -> str:
    return f"{FOLDER}/step-{step:08d}.a{attempt:04d}"


@dataclass(frozen=True)
class Entry:
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
class Fence:
    """What the newest holder of the run accepts: its own attempt, and what it found when it took over."""

    attempt: int
    inherited: dict[str, str]
    """manifest digest by folder name"""

    def admits(self, entry: Entry) -> bool:
        if entry.attempt >= self.attempt:  # of a newer one the lease is damaged: its checkpoints are none the worse
            return True
        return entry.manifest is None or self.inherited.get(entry.name) in ("", entry.manifest.digest)


@dataclass(frozen=True)
class Lineage:
    """Which run this is, and which checkpoints lead up to where it stands: a fork leaves the rest of the timeline that
    it came from behind.
    """

    run: str
    timeline: int
    until: dict[int, int]
    """the last step that counts, of every earlier timeline"""

    def has(self, entry: Entry) -> bool:
        if entry.manifest is None:
            return True
        own = entry.manifest.timeline == self.timeline
        return entry.manifest.run == self.run and (own or entry.step <= self.until.get(entry.manifest.timeline, -1))

    @classmethod
    def of(cls, identity: dict[str, Any]) -> Lineage:
        """As identity.json keeps it."""
        until = {int(timeline): int(step) for timeline, step in identity.get("until", {}).items()}
        return cls(str(identity.get("run", "")), int(identity.get("timeline", 1)), until)


def store_of(folder: RunFolder) -> PosixStore:
    return PosixStore(folder.root)


def everything(store: Store) -> list[Entry]:
    """Every folder of a checkpoint, newest first, whatever became of it."""
    fence = fence_of(store)
    found = []
    for name in store.names(FOLDER):
        if match := SPELLING.fullmatch(name):
            entry = look(store, f"{FOLDER}/{name}", int(match[1]), int(match[2]))
            found.append(entry if fence.admits(entry) else fenced(entry, fence))
    return sorted(found, key=lambda entry: (entry.step, entry.attempt), reverse=True)


def published(store: Store, lineage: Lineage | None = None) -> list[Entry]:
    """The checkpoints of a run, newest first, damaged ones among them."""
    entries = [entry for entry in everything(store) if entry.published and not entry.fenced]
    return entries if lineage is None else [entry for entry in entries if lineage.has(entry)]


def look(store: Store, folder: str, step: int, attempt: int) -> Entry:
    try:
        size = store.size(f"{folder}/{NAME}")
        if size is None:
            return Entry(store, folder, step, attempt, None, "never published", published=False)
        if size > LARGEST:
            raise Damaged(f"the manifest has {size:,} bytes, over {LARGEST:,}")
        manifest = Manifest.decode(store.read(f"{folder}/{NAME}", 0, size + 1))
        if (manifest.step, manifest.attempt) != (step, attempt):
            raise Damaged(f"the manifest is that of step {manifest.step}, attempt {manifest.attempt}")
    except (Damaged, OSError) as problem:
        return Entry(store, folder, step, attempt, None, str(problem))
    return Entry(store, folder, step, attempt, manifest)


def fenced(entry: Entry, fence: Fence) -> Entry:
    why = f"published by attempt {entry.attempt} after attempt {fence.attempt} had taken the run over"
    return Entry(entry.store, entry.folder, entry.step, entry.attempt, entry.manifest, why, fenced=True)


def leases(store: Store) -> list[tuple[int, dict[str, Any]]]:
    """(attempt, lease) of every attempt that took the run, newest first; a torn one was never taken."""
    return [(attempt, lease) for attempt in attempts(store) if (lease := read_lease(store, attempt))]


def attempts(store: Store) -> list[int]:
    """The numbers of the attempts that have a folder, newest first."""
    names = store.names("attempts")
    return sorted((int(name) for name in names if re.fullmatch(r"[0-9]{4,9}", name)), reverse=True)


def read_lease(store: Store, attempt: int) -> dict[str, Any] | None:
    try:
        values = json.loads(store.read(f"attempts/{attempt:04d}/{LEASE}", 0, MAX_JSON_BYTES))
        said = values.pop("digest")
        sane = isinstance(values["inherited"], dict) and type(values["pid"]) is int and values["pid"] > 0
        return values if sane and digest_of(values) == said else None
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None


def fence_of(store: Store) -> Fence:
    for attempt in attempts(store):
        if lease := read_lease(store, attempt):
            return Fence(attempt, lease["inherited"])
    return Fence(0, {})
