"""`meshwright practice incident`: a live job with a hidden fault, and the score of the answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.base.cli.args import Json, flag, option
from meshwright.base.terminal.output import emit, emit_text
from meshwright.errors import ConfigError

if TYPE_CHECKING:
    from meshwright_practice.incidents.scoring import IncidentScore
    from meshwright_practice.incidents.session import ClosedIncident, IncidentSession, OpenIncident

TOOLS = (
    "meshwright watch RUN --once",
    "meshwright diagnose RUN",
    "meshwright report RUN",
    "meshwright data show RUN --step K",
    "meshwright checkpoint list RUN",
    "meshwright checkpoint verify RUN",
)
"""Commands that the briefing lists."""


def practice_incident(
    seed: Annotated[int | None, option("N", "draw this incident (default: a random one)")] = None,
    class_: Annotated[str | None, option("NAME", "draw an incident of this class, to train for it")] = None,
    steps: Annotated[int | None, option("N", "steps of the job (default: 400, about a minute)")] = None,
    answer: Annotated[
        tuple[str, ...] | None,
        option("FIELD=VALUE", "answer the open incident: class= rank= step= fix= evidence=; without them, asks"),
    ] = None,
    hint: Annotated[bool, flag("print the next of three hints; each costs points")] = False,
    story: Annotated[bool, flag("print the full story; an open incident is given up")] = False,
    list_: Annotated[bool, flag("list the incidents so far with their scores")] = False,
    stop: Annotated[bool, flag("stop the job; its records stay, and the incident can be answered")] = False,
    json: Json = False,
) -> None:
    """Practice incident: start a job with a hidden fault, find it with Meshwright's own tools, and be scored."""
    from meshwright_practice.incidents.incident import DEFAULT_STEPS
    from meshwright_practice.incidents.session import IncidentSession

    modes = {"--answer": answer is not None, "--hint": hint, "--story": story, "--list": list_, "--stop": stop}
    chosen = [name for name, given in modes.items() if given]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} are given", "expected one of them")
    drawing = {"--seed": seed, "--class": class_, "--steps": steps}
    given = [name for name, value in drawing.items() if value is not None]
    if chosen and given:
        raise ConfigError(f"{given[0]} draws a new incident, and {chosen[0]} is about the open one", "expected one")
    session = IncidentSession()
    try:
        if answer is not None:
            answer_incident(session, answer, json)
        elif hint:
            show_hint(session, json)
        elif story:
            show_story(session, json)
        elif list_:
            show_list(session, json)
        elif stop:
            current = session.stop()
            text = f"incident {current.name}: {current.job.sentence}; its records are in {current.run}"
            emit(json, {"incident": current.name, "job": current.job.status, "run": str(current.run)}, text)
        else:
            brief(session.start(seed, class_, DEFAULT_STEPS if steps is None else steps), json)
    finally:
        for note in session.notes:
            print(f"meshwright: {note}", file=sys.stderr)


def brief(current: OpenIncident, json: bool) -> None:
    """Prints what the pager says, and how to investigate."""
    page = current.incident.text(current.incident.kind.page)
    commands = [tool.replace("RUN", str(current.run)) for tool in TOOLS]
    lines = [
        f"Incident {current.name}",
        "",
        page,
        "",
        f"The job runs in the background, for at most five minutes: {current.run}",
        f"Its output is in {current.folder / 'job.log'}. Investigate with",
        *(f"  {command}" for command in commands),
        "",
        "Answer with meshwright practice incident --answer. --hint costs points, --story gives up, --stop ends it.",
    ]
    value = {
        "incident": current.name,
        "page": page,
        "run": str(current.run),
        "log": str(current.folder / "job.log"),
        "tools": commands,
        "pid": current.job.pid,
    }
    emit(json, value, "\n".join(lines))


def answer_incident(session: IncidentSession, words: tuple[str, ...], json: bool) -> None:
    from meshwright_practice.incidents.answer import ask_answer, parse_answer

    session.require_fault()  # before a user answers five questions
    if words:
        answer = parse_answer(words)
    elif json or not sys.stdin.isatty():
        raise ConfigError(
            "--answer asks on a terminal, and there is none",
            "expected --answer class=NAME rank=N step=N fix=NAME evidence=TEXT",
        )
    else:
        try:
            answer = ask_answer(input, emit_text)
        except EOFError:
            raise ConfigError("the answer is not complete", "try --answer again: the incident is still open") from None
    show_closed(session.answer(answer), json)


def show_story(session: IncidentSession, json: bool) -> None:
    session.close_lost()
    show_closed(session.newest_closed() if session.find_open() is None else session.give_up(), json)


def show_closed(closed: ClosedIncident, json: bool) -> None:
    """Prints the score and the story of an incident."""
    from meshwright_practice.incidents.story import story_text

    score = None if closed.score is None else closed.score.to_json()
    value: dict[str, Any] = {"incident": closed.name, "score": score, "story": closed.story.to_json()}
    lines = [f"Incident {closed.name}"]
    if closed.score is not None:
        lines += ["", *score_lines(closed.score)]
    emit(json, value, "\n".join([*lines, "", story_text(closed.story)]))


def score_lines(score: IncidentScore) -> list[str]:
    from meshwright.base.io import format_clock

    lines = []
    for field in score.fields:
        right = "" if field.points == field.possible else f"   right: {field.true}"
        note = f" ({field.reason})" if field.reason else ""
        lines.append(
            f"  {field.field:<9} {field.points:>3} of {field.possible:<3} {field.answered or '-'}{note}{right}"
        )
    lines.append(
        f"  {'time':<9} {-score.time_cost:>3}        {format_clock(score.seconds)}, par {format_clock(score.par)}"
    )
    lines.append(f"  {'hints':<9} {-score.hint_cost:>3}        {score.hints}")
    return [*lines, f"  {'score':<9} {score.total:>3} of 100"]


def show_hint(session: IncidentSession, json: bool) -> None:
    from meshwright_practice.incidents.scoring import HINT_COST

    current, text = session.hint()
    number = current.hints + 1
    value = {"incident": current.name, "hint": text, "number": number, "cost": HINT_COST * number}
    emit(json, value, f"Hint {number} (-{HINT_COST} points): {text}")


def show_list(session: IncidentSession, json: bool) -> None:
    from meshwright.base.io import format_clock

    session.close_lost()
    rows = session.rows()
    lines = []
    for row in rows:
        clock = format_clock(row["seconds"]) if isinstance(row.get("seconds"), int | float) else ""
        score = f"{row['score']:>3} of 100" if isinstance(row.get("score"), int) else ""
        state = str(row.get("state", ""))
        if state == "open" and (current := session.find_open()) is not None and current.name == row["incident"]:
            state = f"open: {current.job.sentence}"
        lines.append(f"{row['incident']}  {row.get('class', '-')!s:<20} {score:<11} {clock:<9} {state}".rstrip())
    text = "\n".join(lines) or "no incident so far; try meshwright practice incident"
    emit(json, {"incidents": rows}, text)
