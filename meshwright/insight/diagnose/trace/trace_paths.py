"""Finds the trace files that the arguments of a command name: files, or folders of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.errors import ConfigError

SUFFIXES = (".json", ".json.gz", ".gz")
MAX_TRACES = 1024


def find_traces(paths: Sequence[Path]) -> list[Path]:
    """Lists the given files, and the traces in the given folders in the order of their names."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(child for child in path.iterdir() if child.name.endswith(SUFFIXES) and child.is_file())
            if not inside:
                raise ConfigError(
                    f"{path} is not a run folder and has no traces",
                    "expected a folder that meshwright train wrote, or files whose names end in .json or .json.gz",
                )
            found += inside
        elif not path.exists():
            raise ConfigError(
                f"{path} does not exist", "expected a run folder, or a trace that torch.profiler exported"
            )
        else:
            found.append(path)
    if len(found) > MAX_TRACES:
        raise ConfigError(f"{len(found):,} traces are given", f"expected at most {MAX_TRACES:,}")
    return found
