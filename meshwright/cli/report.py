"""`meshwright report`: compares what a run measured with what was predicted for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from meshwright.cli.args import NO_ENTRY_POINTS, Json, flag, positional
from meshwright.cli.output import emit_json


def report(
    run: Annotated[Path, positional("RUN", "folder of a run that is running, finished or failed")],
    strict: Annotated[bool, flag("exit with code 1 if counted bytes differ from the predicted ones")] = False,
    json: Json = False,
    *,
    entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
) -> None:
    """Report: show measured step time, memory and communication next to their predictions, with the errors."""
    from meshwright.api.prediction import report_run
    from meshwright.launch.user_code.entry_points import load_user_code
    from meshwright.observe.report.report_text import report_json, show_report

    result = report_run(run, load_user_code(entry_points))
    if json:
        emit_json(report_json(result))
    else:
        show_report(result)
    if strict and result.mismatches:
        raise SystemExit(1)
