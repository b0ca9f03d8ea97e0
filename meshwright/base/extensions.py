"""Extensions: what an area, or another distribution, adds to Meshwright by an entry point of a group. Torch-free."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any


def extensions(group: str) -> list[EntryPoint]:
    """The entry points of a group, those of Meshwright first."""
    return sorted(entry_points(group=group), key=lambda entry: (not entry.module.startswith("meshwright."), entry.name))


def package(entry: EntryPoint) -> str:
    """The area of an extension, such as meshwright.planner, or the package of another distribution."""
    parts = entry.module.split(".")
    return ".".join(parts[:2]) if parts[0] == "meshwright" else parts[0]


def is_present(name: str) -> bool:
    """Whether a package is there; it is not imported. An area may be left out of a copy of Meshwright."""
    return find_spec(name) is not None


def first_extension(group: str) -> Any | None:
    """Imports the first extension of a group that is there, or returns None."""
    return next((entry.load() for entry in extensions(group) if is_present(package(entry))), None)
