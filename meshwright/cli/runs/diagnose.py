"""`meshwright diagnose`: names what limits a run, or the program that profiler traces are of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshwright.cli.args import Json, positional
from meshwright.cli.output import emit_json


def diagnose(
    paths: Annotated[
        tuple[Path, ...],
        positional("RUN|TRACE", "run folder, or one torch.profiler trace per rank, or a folder of traces"),
    ],
    json: Json = False,
) -> None:
    """Diagnose: name what limits a run or a traced program, with the evidence and the change that helps."""
    if len(paths) == 1 and is_run_folder(paths[0]):
        from meshwright.diagnose.run.diagnose import diagnose_run
        from meshwright.history.run_history import RunHistory
        from meshwright.observe.diagnosis_text import show_findings
        from meshwright.telemetry.run_folder import RunFolder

        findings = diagnose_run(RunHistory(RunFolder(paths[0])))
        if json:
            emit_json({"findings": [finding.to_json() for finding in findings]})
        else:
            show_findings(findings)
        return
    from meshwright.diagnose.trace.diagnose import diagnose_traces
    from meshwright.diagnose.trace.trace_paths import find_traces
    from meshwright.observe.diagnosis_text import show_trace_diagnosis

    diagnosis = diagnose_traces(find_traces(paths))
    if json:
        emit_json(diagnosis.to_json())
    else:
        show_trace_diagnosis(diagnosis)


def is_run_folder(path: Path) -> bool:
    return any((path / name).exists() for name in ("run.toml", "events", "attempts"))
