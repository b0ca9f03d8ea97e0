"""The files, the progress and the command line of labs, and watch mode with its keys."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from meshwright_practice.checks import Check
from meshwright_practice.labs import watch
from meshwright_practice.labs.grader import Grading
from meshwright_practice.labs.registry import ORDER, load_lab
from meshwright_practice.labs.texts import describe_grading
from meshwright_practice.labs.watch import LabWatch, file_state
from meshwright_practice.labs.workspace import LabRecord, Workspace
from meshwright_practice.progress import progress_file

from meshwright.base.cli import main
from tests.practice.labs.lab_gradings import shipped_file

RING = load_lab("ring_all_reduce")
PASSED, FAILED = Check("file", True), Check("sum", False, "1", "2", "look")


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path / "practice", lambda text: None)


def test_starter_is_copied_once_and_reset_keeps_a_backup(workspace):
    path, created = workspace.open(RING)
    assert created
    assert path.read_text() == shipped_file(RING.id, "starter").read_text()
    path.write_text("mine")
    assert workspace.open(RING) == (path, False)
    assert path.read_text() == "mine"
    for number in (1, 2):
        path.write_text(f"mine {number}")
        _, backup = workspace.reset(RING)
        assert backup == path.with_name(f"{path.name}.backup-{number}")
        assert backup.read_text() == f"mine {number}"
        assert path.read_text() == RING.starter()


def test_progress_counts_attempts_and_a_pass_stays(workspace):
    workspace.add_attempt(Grading(RING, (PASSED, FAILED)))
    record = workspace.lab_record(RING)
    assert record == LabRecord(False, 1, 1, len(RING.all_checks))
    workspace.add_attempt(Grading(RING, (PASSED,)))
    workspace.add_attempt(Grading(RING, (FAILED,)))
    assert workspace.lab_record(RING) == LabRecord(True, 3, 0, len(RING.all_checks))
    stored = json.loads(progress_file().read_text())["labs"][RING.id]
    assert stored == {"passed": True, "attempts": 3, "checks_passed": 0, "checks": len(RING.all_checks), "hints": 0}


def test_attempts_and_hints_of_several_processes_are_all_counted(workspace):
    code = (
        "from pathlib import Path\n"
        "from meshwright_practice.labs.registry import load_lab\n"
        "from meshwright_practice.labs.grader import Grading\n"
        "from meshwright_practice.labs.workspace import Workspace\n"
        "lab, workspace = load_lab('ring_all_reduce'), Workspace(Path('practice'), print)\n"
        "for _ in range(20): workspace.add_attempt(Grading(lab, ()))\n"
        "workspace.next_hint(lab)"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    record = workspace.lab_record(RING)
    assert (record.attempts, record.hints) == (40, 2)


def test_hints_are_revealed_one_at_a_time(workspace):
    shown = [workspace.next_hint(RING) for _ in range(len(RING.hints) + 1)]
    assert [text for _, text in shown] == [*RING.hints, RING.hints[-1]]


@pytest.mark.parametrize("value", [None, 3, [], {"passed": "yes", "attempts": -1, "checks": "x", "hints": True}])
def test_foreign_record_in_the_progress_file_counts_as_nothing(value):
    assert LabRecord.parse(value) == LabRecord()


def run(*args, cwd, **settings):
    command = [sys.executable, "-m", "meshwright", "practice", "lab", *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, **settings)


def cli(capsys, *args):
    """Runs the verb in this process, where torch is imported already."""
    status = 0
    try:
        main(["practice", "lab", *map(str, args)])
    except SystemExit as error:
        status = error.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_command_copies_grades_and_exits_with_1_until_the_lab_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, _ = cli(capsys, "ring-all-reduce")
    assert status == 1
    assert "write ring_reduce_scatter next" in out
    assert "1 of 12 checks pass, 10 did not run." in out
    status, _, err = cli(capsys, "ring_all_reduce", "--solution")
    assert status == 2
    assert "has not passed yet; try --hint" in err
    status, out, err = cli(capsys, "ring_all_reduce", "--solution", "--force")
    assert (status, out) == (0, RING.solution())
    assert "before the lab has passed" in err
    Path("practice/ring_all_reduce.py").write_text(RING.solution())
    status, out, _ = cli(capsys, "ring_all_reduce", "--json")
    value = json.loads(out)
    assert (status, value["status"], value["subject"]) == (0, "pass", "ring_all_reduce")
    assert [check["name"] for check in value["checks"]] == [*RING.all_checks]
    assert cli(capsys, "ring_all_reduce", "--solution")[0] == 0
    labs = json.loads(cli(capsys, "--list", "--json")[1])["labs"]
    assert [lab["lab"] for lab in labs] == [*ORDER]
    assert (labs[0]["passed"], labs[0]["attempts"]) == (True, 2)
    assert "passed in 2 attempts" in cli(capsys)[1]


def test_file_option_grades_any_file_and_leaves_the_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.py").write_text("x = 1")
    status, out, _ = cli(capsys, "ring_all_reduce", "--file", "other.py", "--json")
    assert (status, json.loads(out)["status"]) == (1, "fail")
    assert not Path("practice").exists()
    assert not progress_file().exists()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("ring",), "there is no lab 'ring'"),
        (("--hint",), "--hint is given without a lab"),
        (("ring_all_reduce", "--limit", "0"), "--limit is 0"),
        (("ring_all_reduce", "--limit", "nan"), "--limit is nan"),
        (("ring_all_reduce", "--force"), "--force is given without --solution"),
        (("ring_all_reduce", "--watch", "--json"), "--watch prints text"),
        (("ring_all_reduce", "--file", "none.py"), "none.py cannot be read"),
    ],
)
def test_mistyped_command_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, args, text):
    monkeypatch.chdir(tmp_path)
    status, _, err = cli(capsys, *args)
    assert status == 2
    assert text in err
    assert err.count("\n") == 1


def test_reset_shows_the_problem(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, out, _ = cli(capsys, "ring_all_reduce", "--reset")
    assert status == 0
    assert out.startswith(RING.title)
    assert "Write these functions in practice/ring_all_reduce.py:" in out


def test_file_that_passes_is_not_said_to_finish_the_lab():
    passed = Grading(RING, (Check("file", True, "", "", ""),))
    assert "The lab is done" in describe_grading(passed, Path("a.py"))
    assert "The lab is done" not in describe_grading(passed, Path("a.py"), recorded=False)


def test_hints_and_list_do_not_import_torch(tmp_path):
    code = (
        "import sys; from meshwright.base.cli import main\n"
        "main(['practice', 'lab', 'ring_all_reduce', '--hint']); main(['practice', 'lab', '--list'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=60)


class Keys:
    """Keys that a user presses, each after one look at the file; then the user quits."""

    def __init__(self, keys):
        self.keys = [*keys]

    def __call__(self, seconds):
        return self.keys.pop(0) if self.keys else "q"


def start_watch(workspace, monkeypatch, keys):
    """A watch whose gradings are counted instead of run."""
    shown, graded = [], []

    def grade(lab, path, limit):
        graded.append((lab.id, path.read_text()))
        return Grading(lab, (PASSED, FAILED))

    monkeypatch.setattr(watch, "grade", grade)
    return LabWatch(RING, workspace, 20.0, shown.append, Keys(keys)), shown, graded


def test_watch_grades_again_only_when_the_file_is_saved(workspace, monkeypatch):
    watching, shown, graded = start_watch(workspace, monkeypatch, [])
    watching.open()
    for text in (None, None, "second", None, "third"):
        if text is not None:
            workspace.file(RING).write_text(text)
            os.utime(workspace.file(RING), ns=(0, len(graded) + 1))
        watching.regrade_if_saved()
    assert [text for _, text in graded] == [RING.starter(), "second", "third"]
    workspace.file(RING).unlink()
    watching.regrade_if_saved()
    assert "is gone" in shown[-1]
    assert file_state(workspace.file(RING)) == ()


def test_keys_show_hints_and_list_and_reset_asks_first(workspace, monkeypatch):
    watching, shown, graded = start_watch(workspace, monkeypatch, ["h", "l", "x", "n", "?", ""])
    workspace.open(RING)
    workspace.file(RING).write_text("mine")
    watching.run()
    text = "\n".join(shown)
    assert RING.hints[0][:60] in text
    assert "labs passed." in text
    assert workspace.file(RING).read_text() == "mine"
    watching, shown, graded = start_watch(workspace, monkeypatch, ["x", "y"])
    watching.run()
    assert workspace.file(RING).read_text() == RING.starter()
    assert graded[-1] == (RING.id, RING.starter())


@pytest.mark.long
def test_watch_without_terminal_grades_on_every_save_and_ctrl_c_exits_130(tmp_path):
    command = [sys.executable, "-m", "meshwright", "practice", "lab", "ring_all_reduce", "--watch"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        lines = iter(process.stdout.readline, "")
        assert any("10 did not run" in line for line in lines)
        (tmp_path / "practice" / "ring_all_reduce.py").write_text("x = 1\n")
        assert any("has no function ring_reduce_scatter" in line for line in lines)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.long
def test_watch_on_a_terminal_reads_keys_and_restores_the_terminal(tmp_path):
    terminal, side = pty.openpty()
    settings = termios.tcgetattr(side)
    command = [sys.executable, "-m", "meshwright", "practice", "lab", "ring_all_reduce", "--watch"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdin=side, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        lines = iter(process.stdout.readline, "")
        assert any(watch.KEYS in line for line in lines)
        os.write(terminal, b"h")
        assert any("(hint 1 of 5" in line for line in lines)
        os.write(terminal, b"xn")
        assert any("by the starter? y/n" in line for line in lines)
        os.write(terminal, b"q")
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert termios.tcgetattr(side) == settings
