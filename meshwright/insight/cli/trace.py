"""`meshwright trace`: merges the spans and profiles of all ranks into one trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import Json, option, positional
from meshwright.base.terminal.output import emit


def trace(
    run: Annotated[Path, positional("RUN", "folder of a run that is running, finished or failed")],
    steps: Annotated[
        str | None, option("FIRST:END", "steps to merge (default: the newest 100, and the profiled ones)")
    ] = None,
    out: Annotated[Path | None, option("FILE", "file to write, .json or .json.gz (default: RUN/trace.json.gz)")] = None,
    json: Json = False,
) -> None:
    """Trace: merge what all ranks recorded into one trace that Perfetto opens, with who waited for whom."""
    from meshwright.insight.trace.trace_text import write_trace

    summary = write_trace(run, steps, out)
    emit(json, summary.to_json(), summary.text())
