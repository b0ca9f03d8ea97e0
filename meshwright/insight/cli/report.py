"""`meshwright report`: compares what a run measured with what was predicted for it, and explains the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import NO_ENTRY_POINTS, Json, flag, option, positional
from meshwright.base.terminal.output import emit_json, emit_text
from meshwright.errors import ConfigError


def report(
    run: Annotated[Path, positional("RUN", "folder of a run that is running, finished or failed")],
    html: Annotated[
        tuple[Path, ...] | None, option("FILE", "write the report as one HTML page (without FILE: RUN/report.html)")
    ] = None,
    markdown: Annotated[
        tuple[Path, ...] | None, option("FILE", "write the report as Markdown (without FILE: RUN/report.md)")
    ] = None,
    strict: Annotated[bool, flag("exit with code 1 if counted bytes differ from the predicted ones")] = False,
    json: Json = False,
    *,
    entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
) -> None:
    """Report: show measured step time, memory and communication next to their predictions, and explain the run."""
    from meshwright.base.user_code.entry_points import load_user_code
    from meshwright.insight.api import report_run
    from meshwright.insight.report.report_text import report_json, show_report
    from meshwright.insight.report.written_reports import report_file, write_report

    files = {
        option: report_file(run, names, option, default)
        for option, names, default in (("--html", html, "report.html"), ("--markdown", markdown, "report.md"))
        if names is not None
    }
    if len(set(files.values())) < len(files):
        raise ConfigError(f"--markdown {files['--markdown']} is also written by --html", "expected a different name")
    result = report_run(run, load_user_code(entry_points))
    for option_name, file in files.items():
        content = result.to_html() if option_name == "--html" else result.to_markdown()
        write_report(file, content, option_name)
    if json:
        emit_json(report_json(result))
    else:
        show_report(result)
        for file in files.values():
            emit_text(f"written: {file}")
    if strict and result.mismatches:
        raise SystemExit(1)
