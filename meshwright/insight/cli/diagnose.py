"""`meshwright diagnose`: names what limits a run, or the program that profiler traces are of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import NO_ENTRY_POINTS, Json, flag, option, positional
from meshwright.base.terminal.output import emit_json
from meshwright.errors import ConfigError


def diagnose(
    paths: Annotated[
        tuple[Path, ...],
        positional("RUN|TRACE", "run folder, or one torch.profiler trace per rank, or a folder of traces"),
    ],
    try_: Annotated[
        bool, flag("RUN: run the first change of settings for a few steps, and say whether its prediction came true")
    ] = False,
    steps: Annotated[int, option("N", "steps of each side of --try")] = 20,
    fork: Annotated[bool, flag("let --try change settings that change the numbers")] = False,
    json: Json = False,
    *,
    entry_points: Mapping[str, str] = NO_ENTRY_POINTS,
) -> None:
    """Diagnose: name what limits a run or a traced program, with the evidence and the change that helps."""
    if len(paths) == 1 and is_run_folder(paths[0]):
        from meshwright.insight.diagnose.api import diagnose_folder, try_first_finding
        from meshwright.insight.terminal.diagnosis_text import show_findings, show_trial

        if try_:
            diagnosis = try_first_finding(paths[0], entry_points, steps=steps, fork=fork)
        else:
            diagnosis = diagnose_folder(paths[0])
        if json:
            emit_json(diagnosis.to_json())
            return
        show_findings(diagnosis.findings)
        if diagnosis.trial is not None:
            show_trial(diagnosis.trial)
        return
    if run := next(filter(is_run_folder, paths), None):
        raise ConfigError(f"{run} is a run folder among {len(paths)} paths", "expected one run folder, or traces only")
    if try_:
        raise ConfigError("--try runs a change of a run", "expected one run folder")
    from meshwright.insight.diagnose.trace.diagnose import diagnose_traces
    from meshwright.insight.diagnose.trace.trace_paths import find_traces
    from meshwright.insight.terminal.diagnosis_text import show_trace_diagnosis

    traced = diagnose_traces(find_traces(paths))
    if json:
        emit_json(traced.to_json())
    else:
        show_trace_diagnosis(traced)


def is_run_folder(path: Path) -> bool:
    return any((path / name).exists() for name in ("run.toml", "events", "attempts"))
