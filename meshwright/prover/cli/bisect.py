"""meshwright bisect: the first step, then the first parameter, in which two runs part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import NO_ENTRY_POINTS, Json, positional
from meshwright.base.terminal.output import emit


def bisect(
    run: Annotated[Path, positional("RUN", "run folder; it is only read")],
    other: Annotated[Path, positional("OTHER", "folder of another run of the same model; it is only read")],
    json: Json = False,
    *,
    entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
) -> None:
    """Bisect: find the first step, then the first parameter, in which two runs part, and what explains it."""
    from meshwright.base.records.run_folder import RunFolder
    from meshwright.base.user_code.entry_points import load_user_code
    from meshwright.prover.replay.bisect import bisect_runs
    from meshwright.prover.replay.bisect_text import describe_difference

    result = bisect_runs(RunFolder(run), RunFolder(other), load_user_code(entry_points))
    emit(json, result.to_json(), describe_difference(result, (str(run), str(other))))
