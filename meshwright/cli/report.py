"""`meshwright report`: compares what a run measured with what was predicted for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshwright.cli.args import Json, flag, positional
from meshwright.cli.output import emit_json


def report(
    run: Annotated[Path, positional("RUN", "folder of a run that is running, finished or failed")],
    strict: Annotated[bool, flag("exit with code 1 if counted bytes differ from the predicted ones")] = False,
    json: Json = False,
) -> None:
    """Report: show measured step time, memory and communication next to their predictions, with the errors."""
    from meshwright.observe.report_text import report_json, show_report
    from meshwright.observe.run_report import build_report
    from meshwright.telemetry.run_folder import RunFolder

    result = build_report(RunFolder(run))
    if json:
        emit_json(report_json(result))
    else:
        show_report(result)
    if strict and result.mismatches:
        raise SystemExit(1)
