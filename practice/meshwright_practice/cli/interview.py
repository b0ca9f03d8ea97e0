"""`meshwright practice interview`: the timed exercise on the user's own file, and scenario drills."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from meshwright.base.cli.args import Json, flag, option
from meshwright.base.terminal.output import emit, emit_json, emit_text
from meshwright.errors import ConfigError


def practice_interview(
    file: Annotated[Path | None, option("FILE", "your notebook (.ipynb) or script (.py)")] = None,
    gate: Annotated[int | None, option("MINUTE", "check one gate only: 5, 15, 30, 40 or 55")] = None,
    fast: Annotated[bool, flag("check the file now, without clock and questions")] = False,
    resume: Annotated[bool, flag("continue the last interview that was paused")] = False,
    assume: Annotated[
        tuple[str, ...] | None,
        option("ANSWER", "answers to the clarifying questions: clarity|production cpu|gpu job|elastic yes|no"),
    ] = None,
    write: Annotated[Path | None, option("DIR", "write a starter file with the signatures into a folder")] = None,
    limit: Annotated[float, option("SECONDS", "time limit of each run of your code")] = 20.0,
    drill: Annotated[
        tuple[str, ...] | None, option("NAME", "a scenario to answer in five parts; without a name, list them")
    ] = None,
    answer: Annotated[Path | None, option("FILE", "your answer to --drill as a text file in five parts")] = None,
    seed: Annotated[int, option("N", "which model and cluster --drill draws")] = 0,
    json: Json = False,
) -> None:
    """Practice interview: build a training pipeline against the clock; every gate is checked by running your code."""
    from meshwright_practice.interview.exercise import GATES, prompt_text
    from meshwright_practice.interview.starter import write_starter

    if not 1 <= limit <= 600:
        raise ConfigError(f"--limit {limit:g} is out of range", "expected 1 to 600 seconds")
    if seed < 0:
        raise ConfigError(f"--seed {seed} is negative", "expected 0 or more")
    if drill is not None:
        run_drill(drill, answer, seed, json)
        return
    if answer is not None:
        raise ConfigError("--answer is the answer to a drill", "expected --drill NAME --answer FILE")
    if write is not None:
        path = write_starter(write)
        emit(json, {"file": str(path)}, f"written: {path}\ntry meshwright practice interview --file {path}")
        return
    if gate is not None and gate not in GATES:
        raise ConfigError(f"--gate {gate} is not a gate", f"expected {', '.join(map(str, GATES))}")
    interactive = not (fast or json or gate is not None) and sys.stdin.isatty() and sys.stdout.isatty()
    if file is None and not resume:
        if interactive:
            raise ConfigError("no file is given", "try --write DIR, then --file DIR/interview.py")
        emit(json, {"prompt": prompt_text()}, prompt_text())
        return
    passed = hold(file, resume, assume, limit) if interactive else check(file, gate, resume, assume, limit, json)
    if not passed:
        raise SystemExit(1)


def check(
    file: Path | None, gate: int | None, resume: bool, assume: tuple[str, ...] | None, limit: float, json: bool
) -> bool:
    """Checks the file once, and prints the result; True if every gate is green."""
    from meshwright_practice.interview.exercise import GATES
    from meshwright_practice.interview.session import parse_assumptions, resume_session
    from meshwright_practice.progress import load_progress, progress_file

    options, answered = parse_assumptions(assume or ()), assume is not None
    if resume:
        session = resume_session(load_progress(progress_file(), note))
        file = Path(session.file) if file is None else file
        options, answered = (options, True) if assume else (session.options, session.answered)
    assert file is not None
    gates = GATES if gate is None else (gate,)
    from meshwright_practice.interview.submission import read_submission

    read_submission(file)  # a mistake in the file is reported before torch is imported
    from meshwright_practice.interview.report import check_file, report_json, report_text

    report = check_file(file, options, answered, gates, limit)
    if json:
        emit_json(report_json(report))
    else:
        emit_text(report_text(report))
    return report.passed


def hold(file: Path | None, resume: bool, assume: tuple[str, ...] | None, limit: float) -> bool:
    """The interview in a terminal; a paused one counts as passed."""
    from meshwright_practice.interview.interactive import ask_clarifications, conduct, real_terminal
    from meshwright_practice.interview.session import new_session, parse_assumptions, resume_session, save_session
    from meshwright_practice.progress import load_progress, progress_file, save_progress

    terminal = real_terminal(emit_text)
    progress = load_progress(progress_file(), note)
    if resume:
        session = resume_session(progress)
        session.running_since = terminal.clock()
    else:
        assert file is not None
        if not file.is_file():
            raise ConfigError(f"{file} is not a file", "try --write DIR first")
        now = terminal.clock()
        options = parse_assumptions(assume) if assume is not None else ask_clarifications(terminal)
        session = new_session(file, options, True, now)

    def save() -> None:
        save_session(session, progress)
        save_progress(progress, progress_file())

    save()
    try:
        report = conduct(session, terminal, save, limit)
    except BaseException:
        session.pause(terminal.clock())
        save()
        raise
    return report is None or report.passed


def note(text: str) -> None:
    """A remark about the progress file, beside the result."""
    print(f"meshwright: {text}", file=sys.stderr)


def run_drill(drill: tuple[str, ...], answer: Path | None, seed: int, json: bool) -> None:
    """Lists the drills, or shows one, or grades an answer to it."""
    from meshwright_practice.interview.drills.answer import ask_answer, read_answer
    from meshwright_practice.interview.drills.case_figures import draw_case
    from meshwright_practice.interview.drills.drill_grading import grade_answer
    from meshwright_practice.interview.drills.drill_text import drill_json, drill_text, question_text, scenario_list
    from meshwright_practice.interview.drills.scenarios import SCENARIOS, find_scenario

    if len(drill) > 1:
        raise ConfigError(f"--drill {' '.join(drill)} names more than one scenario", "expected --drill NAME")
    if not drill:
        if answer is not None:
            raise ConfigError("--answer needs a scenario", "expected --drill NAME --answer FILE")
        emit(json, {"drills": {name: each.question for name, each in SCENARIOS.items()}}, scenario_list())
        return
    case = draw_case(find_scenario(drill[0]), seed)
    if answer is None:
        if json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            emit(json, {"drill": drill[0], "seed": seed, "text": case.text()}, question_text(case, seed))
            return
        from meshwright_practice.interview.interactive import real_terminal

        emit_text(question_text(case, seed))
        given = ask_answer(real_terminal(emit_text).ask)
    else:
        given = read_answer(answer)
    checks = grade_answer(case, given)
    emit(json, drill_json(case, seed, checks), drill_text(case, checks))
    if not all(check.passed for check in checks):
        raise SystemExit(1)
