"""The session: its clock survives a pause, it asks the questions, and the command line reports as documented."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from meshwright_practice.interview.exercise import CLARIFICATIONS, CONTRACT, GATES, STAGES
from meshwright_practice.interview.follow_ups import FOLLOW_UPS, FOUR_QUESTIONS, PRESSURE_QUESTIONS
from meshwright_practice.interview.session import new_session, parse_assumptions, resume_session, save_session
from meshwright_practice.progress import PracticeProgress

from meshwright.base.cli import main
from meshwright.errors import ConfigError
from tests.practice.interview.notebook_sources import NOTEBOOKS, script

ROOT = Path(__file__).parents[3]


def test_clock_stands_still_while_paused(tmp_path):
    session = new_session(tmp_path / "a.py", parse_assumptions(()), True, 1000.0)
    assert session.minutes(1300.0) == 5
    session.pause(1300.0)
    assert session.minutes(9000.0) == 5
    progress = PracticeProgress()
    save_session(session, progress)
    again = resume_session(progress)
    again.running_since = 20_000.0
    assert again.minutes(20_060.0) == 6
    assert (again.file, again.options, again.answered) == (session.file, session.options, True)


def test_resume_takes_the_newest_interview_that_is_not_finished(tmp_path):
    progress = PracticeProgress()
    with pytest.raises(ConfigError, match="no interview to resume"):
        resume_session(progress)
    first = new_session(tmp_path / "a.py", parse_assumptions(()), True, 1e9)
    second = new_session(tmp_path / "b.py", parse_assumptions(("elastic",)), True, 1.1e9)
    for session in (first, second):
        session.pause(1.2e9)
        save_session(session, progress)
    assert resume_session(progress).id == second.id
    second.finished = True
    save_session(second, progress)
    assert resume_session(progress).id == first.id


def test_damaged_session_is_refused(tmp_path, home):
    progress = PracticeProgress()
    session = new_session(tmp_path / "a.py", parse_assumptions(()), True, 1e9)
    save_session(session, progress)
    (home / "interviews" / f"{session.id}.json").write_text('{"options": {"scope": "x"}, "gates": {}}')
    with pytest.raises(ConfigError):
        resume_session(progress)
    progress.interviews = {"../../etc": {"finished": False}}
    with pytest.raises(ConfigError, match="names an interview"):
        resume_session(progress)


def test_answers_are_parsed_by_word():
    assert parse_assumptions(("elastic", "no"))["restart"] == "elastic"
    with pytest.raises(ConfigError, match="not an answer"):
        parse_assumptions(("maybe",))


def test_every_check_raises_a_question_and_every_gate_is_in_the_table():
    names = {name for stage in STAGES for name in stage.checks if not name.startswith("contract")}
    missing = names - set(FOLLOW_UPS)
    assert missing == set()
    assert GATES == (5, 15, 30, 40, 55)
    assert len(CLARIFICATIONS) == len(FOUR_QUESTIONS) == len(PRESSURE_QUESTIONS) == 4


def test_scripted_terminal_goes_through_the_gates_pauses_and_resumes(tmp_path):
    """A person who checks two gates, of which the second stays red, pauses, comes back and goes on to the questions."""
    from meshwright_practice.interview.interactive import InterviewTerminal, ask_clarifications, conduct

    path = tmp_path / "answer.py"
    source = script("good", ("    rank, world_size", "    raise ValueError('not yet')\n    rank, world_size"))
    path.write_text(source)
    said: list[str] = []
    now = [0.0]
    lines: list[str | None] = ["", None, None, "", "broken", "q"]

    def wait_line(_seconds):
        now[0] += 8 * 60
        line = lines.pop(0)
        if line == "broken":  # the file has a syntax error at this moment
            path.write_text("def train(:\n")
            lines.insert(0, "mended")
        elif line == "mended":
            path.write_text(source)
        return line

    terminal = InterviewTerminal(said.append, lambda question: said.append(question) or "2", wait_line, lambda: now[0])
    options = ask_clarifications(terminal)
    assert options == {"scope": "production", "device": "gpu", "restart": "elastic", "metrics": "no"}
    session = new_session(path, parse_assumptions(("job", "no")), True, now[0])
    progress = PracticeProgress()
    assert conduct(session, terminal, lambda: save_session(session, progress), 60) is None
    assert any("Minute 15: the gate is due" in text for text in said)
    assert any("line 1: invalid syntax" in text for text in said)
    assert {gate: row["passed"] for gate, row in session.gates.items()} == {"5": True, "15": False}
    assert session.gates["15"]["in_time"] is False
    again = resume_session(progress)
    again.running_since = now[0]
    lines[:] = ["n"]
    report = conduct(again, terminal, lambda: save_session(again, progress), 60)
    assert not report.passed
    assert FOLLOW_UPS["single_run"].question in "\n".join(said)
    assert progress.interviews[session.id]["finished"] is True
    text = "\n".join(said)
    for question in (*FOUR_QUESTIONS, *PRESSURE_QUESTIONS):
        assert question.question in text
        assert question.listen_for in text


def test_command_line_reports_json_and_exits_with_1_if_a_gate_is_red(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["practice", "interview", "--file", str(NOTEBOOKS / "no_set_epoch.ipynb"), "--gate", "30", "--json"])
    assert ended.value.code == 1
    value = json.loads(capsys.readouterr().out)
    assert value["status"] == "fail"
    assert [check["name"] for check in value["checks"] if not check["passed"]] == ["partition_reshuffle"]
    assert value["follow_ups"][0]["check"] == "partition_reshuffle"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--gate", "7", "--file", "x.py"], "is not a gate"),
        (["--file", "missing.py"], "cannot be read"),
        (["--resume"], "no interview to resume"),
        (["--drill", "nothing"], "is unknown"),
        (["--answer", "x"], "expected --drill NAME"),
        (["--limit", "0"], "out of range"),
        (["--file", "x.py", "--assume", "maybe"], "is not an answer"),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(args, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["practice", "interview", *args])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_reading_a_file_does_not_import_torch(tmp_path):
    import subprocess

    code = (
        "import sys; from meshwright.base.cli import main\n"
        f"main(['practice', 'interview', '--write', {str(tmp_path / 'new')!r}])\n"
        "main(['practice', 'interview'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, stdin=subprocess.DEVNULL)


def test_page_lists_every_function_and_every_check():
    text = (ROOT / "docs" / "practice-interview.md").read_text()
    assert all(f"`{function.signature}`" in text for function in CONTRACT.values())
    assert all(f"`{name}`" in text for stage in STAGES for name in stage.checks)


def test_example_is_the_good_notebook():
    example = json.loads((ROOT / "examples" / "interview.ipynb").read_text())
    good = json.loads((NOTEBOOKS / "good.ipynb").read_text())
    assert example["cells"][1:] == good["cells"][1:]
