"""meshwright practice lab: writes parts of distributed training and grades them."""

from __future__ import annotations

import sys
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshwright.base.cli.args import Json, flag, option, positional
from meshwright.base.terminal.output import emit, emit_json, emit_text
from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from meshwright_practice.labs.lab import Lab
    from meshwright_practice.labs.workspace import Workspace

MAX_LIMIT = 3600.0


def practice_lab(
    name: Annotated[
        str | None, positional("NAME", "lab to work on (default: with --watch the next one, else the list)")
    ] = None,
    watch: Annotated[
        bool, flag("grade again whenever the file is saved; on a terminal, keys give hints and more")
    ] = False,
    hint: Annotated[bool, flag("show the next hint")] = False,
    reset: Annotated[bool, flag("copy the starter again; the file is kept as a backup")] = False,
    list_: Annotated[bool, flag("list the labs and the progress")] = False,
    solution: Annotated[bool, flag("show the reference solution of a lab that has passed")] = False,
    force: Annotated[bool, flag("with --solution: also before the lab has passed")] = False,
    file: Annotated[Path | None, option("FILE", "grade this file instead; the progress does not change")] = None,
    folder: Annotated[Path, option("DIR", "folder of your files")] = Path("practice"),
    limit: Annotated[float, option("SECONDS", "time limit of one grading; raise it on a busy machine")] = 20.0,
    json: Json = False,
) -> None:
    """Practice lab: write a part of distributed training; checks on local ranks grade it. Exit 1 if a check fails."""
    from meshwright_practice.labs.registry import find_lab
    from meshwright_practice.labs.workspace import Workspace

    if not (isfinite(limit) and 0 < limit <= MAX_LIMIT):
        raise ConfigError(f"--limit is {limit:g}", f"expected a number of seconds above 0, at most {MAX_LIMIT:g}")
    if force and not solution:
        raise ConfigError("--force is given without --solution", "expected --solution --force")
    if watch and json:
        raise ConfigError("--watch prints text for people, not JSON", "try --json without --watch")
    workspace = Workspace(folder, lambda text: print(f"meshwright: {text}", file=sys.stderr))
    lab = find_lab(name) if name is not None else workspace.next_lab() if watch else None
    if list_ or lab is None:
        for option_name, given in (("--hint", hint), ("--reset", reset), ("--solution", solution), ("--file", file)):
            if given and not list_:
                raise ConfigError(f"{option_name} is given without a lab", "expected meshwright practice lab NAME")
        show_list(workspace, json)
    elif hint:
        show_hint(lab, workspace, json)
    elif reset:
        reset_lab(lab, workspace, json)
    elif solution:
        show_solution(lab, workspace, force, json)
    elif watch:
        from meshwright_practice.labs.watch import watch_lab

        watch_lab(lab, workspace, limit, lambda text: print(text, flush=True))
    else:
        grade_once(lab, workspace, file, limit, json)


def show_list(workspace: Workspace, json: bool) -> None:
    from dataclasses import asdict

    from meshwright_practice.labs.texts import describe_list

    records = workspace.records()
    rows = [{"lab": lab.id, "title": lab.title, "chapter": lab.chapter} | asdict(record) for lab, record in records]
    emit(json, {"labs": rows}, describe_list(records))


def show_hint(lab: Lab, workspace: Workspace, json: bool) -> None:
    from meshwright_practice.labs.texts import describe_hint

    number, text = workspace.next_hint(lab)
    value = {"lab": lab.id, "hint": text, "number": number, "hints": len(lab.hints)}
    emit(json, value, describe_hint(lab, number, text))


def reset_lab(lab: Lab, workspace: Workspace, json: bool) -> None:
    from meshwright_practice.labs.texts import describe_problem

    path, backup = workspace.reset(lab)
    kept = f"; what it was is in {backup}" if backup else ""
    value = {"lab": lab.id, "file": str(path), "backup": str(backup) if backup else None}
    emit(json, value, f"{describe_problem(lab, path)}\n{path} is the starter{kept}")


def show_solution(lab: Lab, workspace: Workspace, force: bool, json: bool) -> None:
    passed = workspace.lab_record(lab).passed
    if not passed and not force:
        raise ConfigError(f"the lab {lab.id} has not passed yet", "try --hint, or --solution --force")
    if json:
        emit_json({"lab": lab.id, "passed": passed, "solution": lab.solution()})
        return
    if not passed:
        print(f"meshwright: the solution of {lab.id} is shown before the lab has passed", file=sys.stderr)
    emit_text(lab.solution().rstrip("\n"))


def grade_once(lab: Lab, workspace: Workspace, file: Path | None, limit: float, json: bool) -> None:
    from meshwright_practice.checks import results
    from meshwright_practice.labs.grader import grade
    from meshwright_practice.labs.texts import describe_grading, describe_problem

    path, created = (file, False) if file is not None else workspace.open(lab)
    if created and not json:
        emit_text(describe_problem(lab, path))
    grading = grade(lab, path, limit)
    if file is None:
        workspace.add_attempt(grading)
    failure = grading.first_failure
    text = describe_grading(grading, path, recorded=file is None)
    emit(json, results(lab.id, grading.checks, failure.message if failure else ""), text)
    if not grading.passed:
        raise SystemExit(1)
