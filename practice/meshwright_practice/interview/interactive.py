"""The interview in a terminal: it asks, keeps the time, checks gates, and ends with questions and a review."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.base.io import format_clock
from meshwright.errors import ConfigError
from meshwright_practice.interview.exercise import CLARIFICATIONS, STAGES, prompt_text
from meshwright_practice.interview.follow_ups import FOUR_QUESTIONS, PRESSURE_QUESTIONS
from meshwright_practice.interview.grade import GateResult
from meshwright_practice.interview.report import InterviewReport, check_file, gate_text, report_text
from meshwright_practice.interview.session import InterviewSession

POLL = 5.0
"""Seconds between looks at the clock while the user works."""


@dataclass(frozen=True)
class InterviewTerminal:
    """Where the interview asks and prints, so that a test can stand in for a person."""

    say: Callable[[str], None]
    ask: Callable[[str], str]
    wait_line: Callable[[float], str | None]
    """a line that was typed within so many seconds, or None"""
    clock: Callable[[], float] = time.time


def real_terminal(say: Callable[[str], None]) -> InterviewTerminal:
    def wait_line(seconds: float) -> str | None:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        if not ready:
            return None
        line = sys.stdin.readline()
        return line.strip() if line else "q"  # the end of the input is a pause

    def ask(question: str) -> str:
        say(question)
        line = sys.stdin.readline()
        return line.strip()

    return InterviewTerminal(say, ask, wait_line)


def ask_clarifications(terminal: InterviewTerminal) -> dict[str, str]:
    """The four questions; an empty line takes the first answer."""
    chosen = {}
    for each in CLARIFICATIONS:
        terminal.say(f"\n{each.question}")
        for number, (answer, change) in enumerate(each.answers.items(), 1):
            terminal.say(f"  {number} {answer}: {change}")
        answers = list(each.answers)
        typed = terminal.ask("Your interviewer says (1 or 2, Enter for 1):")
        picked = answers[int(typed) - 1] if typed in ("1", "2") else typed if typed in answers else answers[0]
        chosen[each.option] = picked
    return chosen


def run_stages(
    session: InterviewSession, terminal: InterviewTerminal, save: Callable[[], None], seconds: float
) -> bool:
    """Goes through the stages that are left; False if the user pauses."""
    while (stage := session.next_stage()) is not None:
        terminal.say(f"\n{stage.title}, until minute {stage.gate}: {stage.task}")
        terminal.say("Enter checks this gate; n goes on to the questions; q pauses (--resume continues).")
        announced = session.minutes(terminal.clock()) > stage.gate
        while (line := terminal.wait_line(POLL)) is None:
            if not announced and session.minutes(terminal.clock()) > stage.gate:
                announced = True
                terminal.say(f"Minute {stage.gate}: the gate is due. Enter checks it.")
        if line == "q":
            session.pause(terminal.clock())
            save()
            return False
        if line == "n":
            break
        try:
            report = check_file(Path(session.file), session.options, session.answered, (stage.gate,), seconds)
        except ConfigError as error:  # such as a syntax error in the middle of the work
            terminal.say(str(error))
            continue
        session.record(report.results[0], terminal.clock())
        save()
        clock = format_clock(60 * session.minutes(terminal.clock()))
        terminal.say(f"{clock} {gate_text(report.results[0])}")
        if stage is STAGES[-1] and report.results[0].passed:
            break
    return True


def conduct(
    session: InterviewSession, terminal: InterviewTerminal, save: Callable[[], None], seconds: float
) -> InterviewReport | None:
    """The whole interview; None if it is paused."""
    terminal.say(prompt_text())
    terminal.say(
        f"\nYour file: {session.file}; the clock is at {format_clock(60 * session.minutes(terminal.clock()))}."
    )
    if not run_stages(session, terminal, save, seconds):
        return None

    def record(result: GateResult) -> None:
        session.record(result, terminal.clock())

    gates = tuple(stage.gate for stage in STAGES)
    report = check_file(Path(session.file), session.options, session.answered, gates, seconds, record)
    terminal.say("\nPushback. Answer each aloud, then Enter shows what to listen for.")
    for question in [*(follow_up for _, follow_up in report.follow_ups), *FOUR_QUESTIONS, *PRESSURE_QUESTIONS]:
        terminal.ask(f"\n{question.question}")
        terminal.say(f"  {question.listen_for}")
    session.pause(terminal.clock())
    session.finished = True
    save()
    terminal.say(report_text(report))
    return report
