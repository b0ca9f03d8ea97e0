"""The progress of a user: one JSON file, written atomically. A damaged file is set aside, never overwritten."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.base.io import meshwright_home, open_descriptor, read_json, write_json
from meshwright.errors import ConfigError

FILE = "practice.json"
FORMAT = 1
SECTIONS = ("cards", "labs", "incidents", "interviews", "damaged")


@dataclass
class PracticeProgress:
    """What the user has done. Each value is plain JSON of the part that writes it, keyed by what it is about."""

    cards: dict[str, Any] = field(default_factory=dict)
    """card -> its schedule and its reviews"""
    labs: dict[str, Any] = field(default_factory=dict)
    incidents: dict[str, Any] = field(default_factory=dict)
    interviews: dict[str, Any] = field(default_factory=dict)
    damaged: dict[str, Any] = field(default_factory=dict)
    """section/key/number -> an entry that could not be read, as it was found"""
    loaded: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False, compare=False)
    """the sections as they were read or saved last: what differs from them is what this process has changed"""

    def sections(self) -> dict[str, dict[str, Any]]:
        return {name: getattr(self, name) for name in SECTIONS}


def progress_file() -> Path:
    return meshwright_home() / FILE


def load_progress(path: Path, report: Callable[[str], None]) -> PracticeProgress:
    """Reads the progress; none yet is an empty one. A damaged file is renamed, and `report` says so.

    A file of a newer version is not damaged: it raises ConfigError and stays as it is.
    """
    try:
        return read_progress(path)
    except DamagedProgress as error:
        try:
            with locked(path):
                return load_locked(path, report)
        except OSError as reason:
            raise keep_error(path, error, reason) from None


def load_locked(path: Path, report: Callable[[str], None]) -> PracticeProgress:
    """Does what `load_progress` does, for a caller that holds the lock."""
    try:
        return read_progress(path)
    except DamagedProgress as error:
        try:
            aside = set_aside(path)
        except OSError as reason:
            raise keep_error(path, error, reason) from None
        report(f"{path} is damaged ({error}); it is kept as {aside}, and progress starts anew")
        return PracticeProgress()


class DamagedProgress(ConfigError):
    """The progress file is there, and it is not one."""


def keep_error(path: Path, error: DamagedProgress, reason: OSError) -> ConfigError:
    """The error for a damaged file that cannot be renamed."""
    return ConfigError(
        f"{path} is damaged ({error}), and it cannot be renamed: {reason.strerror}",
        "try to repair or to remove the file, or MESHWRIGHT_HOME with another folder",
    )


def read_progress(path: Path) -> PracticeProgress:
    """Reads the progress and changes nothing; raises DamagedProgress if the file cannot be read."""
    if not path.exists():
        return PracticeProgress()
    try:
        value = read_json(path, "the progress of meshwright practice", follow=True)
        if not is_newer(value):
            return parse_progress(value, path)
    except ConfigError as error:
        raise DamagedProgress(error.message, error.hint) from None
    raise ConfigError(
        f"{path} was written by a newer version of Meshwright: its format is {value['format']}, expected {FORMAT}",
        "try pip install --upgrade meshwright, or MESHWRIGHT_HOME with another folder",
    )


def is_newer(value: Any) -> bool:
    """Whether the content of a progress file states a format that this version does not know yet."""
    found = value.get("format") if isinstance(value, dict) else None
    return isinstance(found, int) and not isinstance(found, bool) and found > FORMAT


def parse_progress(value: Any, path: Path) -> PracticeProgress:
    valid = isinstance(value, dict) and value.get("format") == FORMAT
    if not valid or not all(isinstance(value.get(name, {}), dict) for name in SECTIONS):
        raise ConfigError(f"{path} is not a progress file of format {FORMAT}", "expected a file that practice wrote")
    sections = {name: value.get(name, {}) for name in SECTIONS}
    return PracticeProgress(**sections, loaded=deepcopy(sections))


def save_progress(progress: PracticeProgress, path: Path) -> None:
    """Writes what has changed since `progress` was read; what other processes have saved since then stays.

    Of two changes of the same entry, the last one counts. `update_progress` reads and writes under one lock.
    """
    with locked(path):
        write_changes(progress, path)


def update_progress(
    path: Path, change: Callable[[PracticeProgress], None], report: Callable[[str], None]
) -> PracticeProgress:
    """Reads the progress, applies `change` and saves it, while no other process does: no update is lost."""
    with locked(path):
        progress = load_locked(path, report)
        change(progress)
        write_changes(progress, path)
    return progress


def write_changes(progress: PracticeProgress, path: Path) -> None:
    """Merges the changed entries into the file, which must be locked. A file that cannot be read is set aside."""
    current = load_locked(path, lambda _: None).sections()
    for name, section in progress.sections().items():
        before = progress.loaded.get(name, {})
        current[name] |= {key: value for key, value in section.items() if key not in before or before[key] != value}
        for key in before.keys() - section.keys():
            current[name].pop(key, None)
        section.clear()
        section.update(current[name])
    write_json(linked_file(path), {"format": FORMAT} | current)
    progress.loaded = deepcopy(current)


def linked_file(path: Path) -> Path:
    """The file that a symbolic link leads to: the link stays, and what it leads to is replaced."""
    return Path(os.path.realpath(path))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a progress file, which is a file beside it: the progress file itself is replaced."""
    path = linked_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open_descriptor(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def set_aside(path: Path) -> Path:
    """Renames a damaged file to the first free name `practice.json.damaged-N`."""
    path = linked_file(path)
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.rename(path, aside)
    return aside
