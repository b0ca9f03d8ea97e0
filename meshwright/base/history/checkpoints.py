"""The checkpoints of a run: when each was published, what it cost, and whether it still exists. Torch-free."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic

from meshwright.base.checkpoint.listing import CHECKPOINTS_FOLDER, NAME_PATTERN
from meshwright.base.checkpoint.manifest import MANIFEST_FILE
from meshwright.base.records.events import Event
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.object_store import ObjectStore
from meshwright.errors import ConfigError

MAX_FOLDERS = 1 << 14
"""The checkpoint folders that are looked at."""
LIST_SECONDS = 10.0


@dataclass
class CheckpointHistory:
    """A checkpoint that was published."""

    step: int
    """the number of completed steps"""
    attempt: int
    time: float | None = None
    """when it was published, in Unix seconds"""
    bytes: float | None = None
    stall_seconds: float | None = None
    """seconds in which the training thread waited for the save"""
    seconds: float | None = None
    """seconds of the save in total"""
    state: str = "deleted"
    """published, deleted (by retention), or damaged (an attempt could not restore it)"""

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}.a{self.attempt:04d}"


@dataclass
class CheckpointRecords:
    """Every checkpoint of a run, from its records and from the folders that exist."""

    by_name: dict[str, CheckpointHistory] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    listed: tuple[float, list[tuple[str, float | None]]] = (-float("inf"), [])
    """when the object store of the run was listed (monotonic clock), and what it had"""

    def receive(self, event: Event) -> None:
        """Takes a `checkpoint` or `damaged` record."""
        if event["kind"] == "damaged":
            self.damaged.add(event["checkpoint"])
            return
        found = CheckpointHistory(event["step"], event["attempt"], event["time"])
        found.bytes, found.stall_seconds, found.seconds = event["bytes"], event["stall_seconds"], event["seconds"]
        self.by_name[found.name] = found
        if len(self.by_name) > 2 * MAX_FOLDERS:
            self.by_name = dict(list(self.by_name.items())[-MAX_FOLDERS:])

    def update(self, folder: RunFolder) -> list[CheckpointHistory]:
        """Looks at the folders that exist, and returns all checkpoints in the order of their steps."""
        published = set()
        for name, time in self.published_objects(folder) if folder.url else published_folders(folder):
            published.add(name)
            if name not in self.by_name and (match := NAME_PATTERN.fullmatch(name)):  # its record was lost
                self.by_name[name] = CheckpointHistory(int(match[1]), int(match[2]), time)
        for name, found in self.by_name.items():
            found.state = "damaged" if name in self.damaged else "published" if name in published else "deleted"
        return sorted(self.by_name.values(), key=lambda found: (found.step, found.attempt))

    def published_objects(self, folder: RunFolder) -> list[tuple[str, float | None]]:
        """(name, unknown time) of every checkpoint in the object store, listed at most every LIST_SECONDS."""
        if monotonic() - self.listed[0] > LIST_SECONDS:
            with suppress(OSError, ConfigError):
                objects = ObjectStore(folder.url).list_sizes(CHECKPOINTS_FOLDER)
                names = [name.split("/")[1] for name in objects if name.endswith(f"/{MANIFEST_FILE}")]
                self.listed = monotonic(), [(name, None) for name in names if NAME_PATTERN.fullmatch(name)]
        return self.listed[1]


def published_folders(folder: RunFolder) -> list[tuple[str, float | None]]:
    """(name, time) of every checkpoint folder with a manifest."""
    root = folder.root / CHECKPOINTS_FOLDER
    published: list[tuple[str, float | None]] = []
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in islice(entries, MAX_FOLDERS) if NAME_PATTERN.fullmatch(entry.name)]
    except OSError:
        return []
    for name in names:
        try:
            status = os.lstat(root / name / MANIFEST_FILE)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            published.append((name, status.st_mtime))
    return published
