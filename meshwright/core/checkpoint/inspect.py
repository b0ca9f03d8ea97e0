"""Answers `meshwright checkpoint`: which checkpoints exist, whether they are intact, how two differ. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.base.checkpoint.listing import (
    CHECKPOINTS_FOLDER,
    NAME_PATTERN,
    CheckpointEntry,
    list_checkpoint_folders,
    list_published,
    open_run_store,
    read_entry,
)
from meshwright.base.checkpoint.manifest import Manifest
from meshwright.base.config import RunConfig, load_config
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.checkpoint.run_state import find_state_damage
from meshwright.core.checkpoint.unsharded import compare_checkpoints, state_digest
from meshwright.core.checkpoint.verify import find_damage
from meshwright.errors import CheckpointError, ConfigError


def find_entries(path: Path) -> list[CheckpointEntry]:
    """Every checkpoint of a run folder, newest first, or the single one of a checkpoint folder."""
    resolved = path.resolve()
    if (match := NAME_PATTERN.fullmatch(resolved.name)) and len(resolved.parents) > 1:
        folder = RunFolder(resolved.parents[1])
        folder.require_own_folders()
        store = open_run_store(folder)
        return [read_entry(store, f"{CHECKPOINTS_FOLDER}/{match[0]}", int(match[1]), int(match[2]))]
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder", "expected a run folder, or a folder under its checkpoints/")
    RunFolder(path).require_own_folders()
    return list_checkpoint_folders(open_run_store(RunFolder(path)))


def find_published(path: Path, step: int | None) -> list[CheckpointEntry]:
    """The valid published checkpoints, newest first, of one step if a step is given; an error if there is none."""
    entries = [e for e in find_entries(path) if e.published and not e.fenced and step in (None, e.step)]
    if not entries:
        steps = ", ".join(str(entry.step) for entry in list_published(open_run_store(RunFolder(path)))) or "none"
        which = f" of step {step}" if step is not None else ""
        raise CheckpointError(f"{path} has no checkpoint{which}", f"expected one of the steps: {steps}")
    return entries


def select_intact(path: Path, step: int | None) -> CheckpointEntry:
    """The newest checkpoint, or the one of a step; an error if it is damaged. One that a running job deletes meanwhile
    is skipped.
    """
    for entry in find_published(path, step):
        damage = find_damage(entry)
        if not damage:
            return entry
        if not entry.was_deleted:
            raise CheckpointError(f"checkpoint {entry.name} is damaged: {damage[0]}")
    return select_intact(path, step)


def run_config(path: Path) -> RunConfig:
    """The config of a run folder, or of the run of a checkpoint folder."""
    resolved = path.resolve()
    return load_config(resolved.parents[1] if NAME_PATTERN.fullmatch(resolved.name) else path)


def list_rows(path: Path) -> list[dict[str, Any]]:
    """A row per checkpoint folder, newest first."""
    rows = []
    for entry in find_entries(path):
        manifest = entry.manifest
        status = entry.problem or "published"
        row: dict[str, Any] = {"name": entry.name, "step": entry.step, "attempt": entry.attempt, "status": status}
        if manifest is not None:
            row |= {
                "timeline": manifest.timeline,
                "files": len(manifest.parts),
                "bytes": manifest.total_bytes,
                "layout": {axis: degree for axis, degree in manifest.layout.items() if axis != "micro"},
                "digest": manifest.digest,
                "parent": manifest.parent,
            } | base_of(manifest)
        rows.append(row)
    return rows


def verify_rows(path: Path, step: int | None) -> list[dict[str, Any]]:
    """A row per published checkpoint, or per checkpoint of a step, with its damage. A checkpoint that a running job
    deletes meanwhile has no row.
    """
    rows = []
    for entry in find_published(path, step):
        damage = find_damage(entry) or find_state_damage(entry)
        if not (damage and entry.was_deleted):
            row = {"name": entry.name, "step": entry.step, "damage": [item.to_json() for item in damage]}
            rows.append(row | (base_of(entry.manifest) if entry.manifest is not None else {}))
    return rows or verify_rows(path, step)


def digest(path: Path, step: int | None) -> dict[str, Any]:
    """One digest of all unsharded tensors."""
    entry = select_intact(path, step)
    with reporting_deletion(entry):
        answer = {"name": entry.name, "step": entry.step, "digest": state_digest(entry)}
    return answer | (base_of(entry.manifest) if entry.manifest is not None else {})


def base_of(manifest: Manifest) -> dict[str, Any]:
    """The frozen parameters that a checkpoint refers to, where it does not contain all parameters."""
    return {"base": manifest.base} if manifest.base else {}


@contextmanager
def reporting_deletion(*entries: CheckpointEntry) -> Iterator[None]:
    """Reports a checkpoint that a running job deletes between its verification and its use."""
    try:
        yield
    except FileNotFoundError:
        names = ", ".join(entry.name for entry in entries if entry.was_deleted)
        if not names:
            raise
        raise CheckpointError(f"{names} was deleted while it was read", "try again, or another --step") from None


def diff(one: Path, other: Path, step: int | None, other_step: int | None) -> dict[str, Any]:
    """The tensors in which two checkpoints differ."""
    a, b = select_intact(one, step), select_intact(other, other_step if other_step is not None else step)
    with reporting_deletion(a, b):
        differences = [vars(difference) | {"text": str(difference)} for difference in compare_checkpoints(a, b)]
    return {"one": a.name, "other": b.name, "differences": differences}
