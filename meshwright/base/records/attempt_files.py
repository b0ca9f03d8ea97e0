"""The small files by which hosts see an attempt of another host: its beat counter, and how it ended. Torch-free.

In a run folder they are files; for a run in an object store, whose folder is only the mirror of one host, they are
objects.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from meshwright.base.checkpoint.listing import open_run_store
from meshwright.base.io import MAX_JSON_BYTES, open_descriptor, open_regular_file
from meshwright.base.records.incidents import Incident
from meshwright.base.records.run_folder import RunFolder
from meshwright.base.store.mirror import LEASE_LIMITS
from meshwright.base.store.object_store import ObjectStore


def file_name(attempt: int, name: str) -> str:
    return f"attempts/{attempt:04d}/{name}"


def write_beat(folder: RunFolder, attempt: int, beats: int) -> None:
    """Advances the counter that shows other hosts that the holder of a lease lives."""
    if folder.url:
        ObjectStore(folder.url, LEASE_LIMITS).replace(file_name(attempt, "beat"), str(beats).encode())
    else:  # in place: a run folder that was deleted must not come back
        write_text(folder.attempt(attempt) / "beat", str(beats))


def read_beat(folder: RunFolder, attempt: int) -> str:
    """The counter; '' if there is none."""
    if not folder.url:
        return read_text(str(folder.attempt(attempt) / "beat"))
    try:
        return open_run_store(folder).read(file_name(attempt, "beat"), 0, 256).decode(errors="replace")
    except FileNotFoundError:
        return ""


def write_incident(folder: RunFolder, incident: Incident) -> None:
    """Writes how an attempt ended, where every host sees it."""
    incident.write(folder)
    if folder.url:
        with suppress(OSError):  # the records are pushed again later
            content = folder.incident(incident.attempt).read_bytes()
            open_run_store(folder).replace(file_name(incident.attempt, "incident.json"), content)


def has_ended(folder: RunFolder, attempt: int) -> bool:
    """Whether the incident of an attempt is there."""
    if folder.url:  # the mirror may have the incident of an earlier run at the same URL
        return open_run_store(folder).size(file_name(attempt, "incident.json")) is not None
    return folder.incident(attempt).exists()


def read_incident(folder: RunFolder, attempt: int) -> Incident | None:
    """How an attempt ended; None if it runs. An incident that cannot be parsed says only that it has ended."""
    if not has_ended(folder, attempt):
        return None
    try:
        raw = open_run_store(folder).read(file_name(attempt, "incident.json"), 0, MAX_JSON_BYTES)
        return Incident(**json.loads(raw))
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        return Incident(attempt, "lost")


def read_text(path: str) -> str:
    try:
        with open_regular_file(Path(path)) as file:
            return file.read(256).decode(errors="replace").strip()
    except OSError:
        return ""


def write_text(path: Path, text: str) -> None:
    file = open_descriptor(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(file, text.encode(), 0)
    finally:
        os.close(file)
