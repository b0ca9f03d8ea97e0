"""`meshwright report RUN`: the words of the verb, and what they lead to. Imports lazily, as all verbs do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from meshwright.words import Json, flag, tell, word


def report(
    run: Annotated[Path, Positional, word("RUN", "a run folder, of a run that goes on, has ended, or broke")],
    strict: Annotated[bool, flag("exit 1 where counted bytes are not those of the formulas")] = False,
    json: Json = False,
) -> None:
    """Report: what a run measured beside what was predicted of it, with the error of each figure."""
    from meshwright.observe.report_text import as_json, show
    from meshwright.observe.run_report import build_report
    from meshwright.telemetry.run_folder import RunFolder

    found = build_report(RunFolder(run))
    tell(True, as_json(found), "") if json else show(found)
    if strict and found.broken:
        raise SystemExit(1)
