"""The last lines that a rank has printed, from its log file in the run folder. Torch-free."""

from __future__ import annotations

import os
from typing import Any

from meshwright.base.io import open_regular_file, printable
from meshwright.base.records.run_folder import RunFolder

MAX_BYTES = 64 << 10
"""Bytes that are read from the end of a log."""
MAX_LINES = 400
MAX_LINE = 2000
"""Characters of a line that are shown."""


def describe_log(folder: RunFolder, attempt: int, rank: int, lines: int) -> dict[str, Any]:
    """The last lines of a rank's output in an attempt, without control characters; no lines if there is no log."""
    path = folder.log(attempt, rank)
    try:
        if any(parent.is_symlink() for parent in (path.parent, path.parent.parent)):
            raise NotADirectoryError(path.parent)
        with open_regular_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - MAX_BYTES))
            text = file.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return {"attempt": attempt, "rank": rank, "found": False, "lines": []}
    shown = text.splitlines()[-max(1, min(lines, MAX_LINES)) :]
    return {"attempt": attempt, "rank": rank, "found": True, "lines": [printable(line)[:MAX_LINE] for line in shown]}
