"""Writes a report where the user says, or into the run folder, which may come from somebody else. Torch-free."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path

from meshwright.base.io import atomic_write, output_file
from meshwright.base.records.run_folder import require_kind
from meshwright.errors import ConfigError


def report_file(run: Path, given: Sequence[Path], option: str, default: str) -> Path:
    """The file that `option` names, or `default` in the run folder. Raises ConfigError if it cannot be written."""
    if len(given) > 1:
        raise ConfigError(f"{option} names {len(given)} files", f"expected {option} FILE, or {option} alone")
    if given:
        return output_file(given[0], option)
    if run.is_dir():  # otherwise the report says that RUN is not a run folder
        require_kind(run / default, stat.S_ISREG, "a regular file")
        output_file(run / default, option)
    return run / default


def write_report(file: Path, content: str, option: str) -> None:
    """Replaces the file atomically."""
    try:
        atomic_write(file, content)
    except OSError as error:
        raise ConfigError(
            f"{option} {file} cannot be written: {error.strerror}",
            "expected a file in a folder that exists and is writable",
        ) from None
