"""What `meshwright checkpoint` answers: which there are, whether they are intact, what they hold. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.checkpoint.listing import (
    CHECKPOINTS_FOLDER,
    NAME_PATTERN,
    CheckpointEntry,
    list_checkpoint_folders,
    list_published,
    read_entry,
)
from meshwright.checkpoint.unsharded import compare_checkpoints, state_digest
from meshwright.checkpoint.verify import find_damage
from meshwright.errors import CheckpointError, ConfigError
from meshwright.store.posix import PosixStore


def find_entries(path: Path) -> list[CheckpointEntry]:
    """Every checkpoint of a run folder, newest first, or the one that a checkpoint's own folder is."""
    if (match := NAME_PATTERN.fullmatch(path.resolve().name)) and len(path.resolve().parents) > 1:
        store = PosixStore(path.resolve().parents[1])
        return [read_entry(store, f"{CHECKPOINTS_FOLDER}/{match[0]}", int(match[1]), int(match[2]))]
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder", "give a run folder, or a folder under its checkpoints/")
    return list_checkpoint_folders(PosixStore(path))


def select_intact(path: Path, step: int | None) -> CheckpointEntry:
    """The newest checkpoint, or that of a step; intact, or an error that says what is wrong with it."""
    listed = [e for e in find_entries(path) if e.published and not e.fenced and step in (None, e.step)]
    if not listed:
        steps = ", ".join(str(e.step) for e in list_published(PosixStore(path))) or "none"
        what = f"{path} has no checkpoint" + (f" of step {step}" if step is not None else "")
        raise CheckpointError(what, f"it has: {steps}")
    if found := find_damage(listed[0]):
        raise CheckpointError(f"checkpoint {listed[0].name} is damaged: {found[0]}")
    return listed[0]


def list_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for entry in find_entries(path):
        manifest = entry.manifest
        status = entry.problem or "published"
        row: dict[str, Any] = {"name": entry.name, "step": entry.step, "attempt": entry.attempt, "status": status}
        if manifest is not None:
            layout = {axis: degree for axis, degree in manifest.layout.items() if axis != "micro"}
            row |= {
                "timeline": manifest.timeline,
                "files": len(manifest.files),
                "bytes": manifest.total_bytes,
                "layout": layout,
                "digest": manifest.digest,
                "parent": manifest.parent,
            }
        rows.append(row)
    return rows


def verify_rows(path: Path, step: int | None) -> list[dict[str, Any]]:
    """Every published checkpoint (or that of a step), with what is wrong with it."""
    listed = [e for e in find_entries(path) if e.published and not e.fenced and step in (None, e.step)]
    if not listed:
        raise CheckpointError(f"{path} has no checkpoint" + (f" of step {step}" if step is not None else ""))
    return [{"name": e.name, "step": e.step, "damages": [d.to_json() for d in find_damage(e)]} for e in listed]


def digest(path: Path, step: int | None) -> dict[str, Any]:
    entry = select_intact(path, step)
    return {"name": entry.name, "step": entry.step, "digest": state_digest(entry)}


def diff(one: Path, other: Path, step: int | None, other_step: int | None) -> dict[str, Any]:
    a, b = select_intact(one, step), select_intact(other, other_step if other_step is not None else step)
    found = [vars(difference) | {"text": str(difference)} for difference in compare_checkpoints(a, b)]
    return {"one": a.name, "other": b.name, "differences": found}
