"""The progress of a user: one JSON file, written atomically. A damaged file is set aside, never overwritten."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError
from meshwright.io import meshwright_home, read_json, write_json

FILE = "practice.json"
FORMAT = 1


@dataclass
class Progress:
    """What the user has done. Each value is plain JSON of the part that writes it, keyed by what it is about."""

    cards: dict[str, Any] = field(default_factory=dict)
    """card -> its schedule and its reviews"""
    labs: dict[str, Any] = field(default_factory=dict)
    incidents: dict[str, Any] = field(default_factory=dict)
    interviews: dict[str, Any] = field(default_factory=dict)


def progress_file() -> Path:
    return meshwright_home() / FILE


def load_progress(path: Path, report: Callable[[str], None]) -> Progress:
    """Reads the progress; none yet is an empty one. A damaged file is renamed, and `report` says so."""
    if not path.exists():
        return Progress()
    try:
        return parse_progress(read_json(path, "the progress of meshwright practice", follow=True), path)
    except ConfigError as error:
        aside = set_aside(path)
        report(f"{path} is damaged ({error}); it is kept as {aside.name}, and progress starts anew")
        return Progress()


def parse_progress(value: Any, path: Path) -> Progress:
    names = Progress.__dataclass_fields__
    valid = isinstance(value, dict) and value.get("format") == FORMAT
    if not valid or not all(isinstance(value.get(name, {}), dict) for name in names):
        raise ConfigError(f"{path} is not a progress file of format {FORMAT}", "expected a file that practice wrote")
    return Progress(**{name: value.get(name, {}) for name in names})


def save_progress(progress: Progress, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT} | asdict(progress))


def set_aside(path: Path) -> Path:
    """Renames a damaged file to the first free name `practice.json.damaged-N`."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    os.rename(path, aside)
    return aside
