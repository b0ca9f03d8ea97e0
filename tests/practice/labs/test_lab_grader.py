"""Grading survives whatever a user's file does, and says what happened: rank, line, and what to do next."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from meshwright_practice.labs.grader import grade
from meshwright_practice.labs.lab import Lab, LabFunction
from meshwright_practice.labs.registry import find_lab

from meshwright.errors import ConfigError
from tests.practice.labs.lab_gradings import shipped_file


def grade_local(work):
    with work.attempt("returns"):
        value = work.module.double(21)
    work.check("value", value == 42, 42, value, "multiply by two")


def grade_on_ranks(work):
    work.ranks("ranks return", lambda world: work.module.double(world.rank), 2)


@dataclass(frozen=True)
class SmallLab(Lab):
    """A lab with one function, graded in one process or on two ranks."""

    on_ranks: bool = False

    def load_checks(self):
        return grade_on_ranks if self.on_ranks else grade_local


def small_lab(on_ranks=False):
    functions = (LabFunction("double", ("number",), "int", "returns twice the number"),)
    checks = ("ranks return",) if on_ranks else ("returns", "value")
    return SmallLab("small", "Double", "Double it.", functions, checks, ("a", "b", "c"), on_ranks=on_ranks)


def grade_text(tmp_path, text, on_ranks=False, limit=20.0):
    path = tmp_path / "double.py"
    path.write_text(text)
    return grade(small_lab(on_ranks), path, limit)


@pytest.mark.parametrize(
    ("text", "check", "found", "message"),
    [
        ("def double(number)\n    return 2", "file", "SyntaxError: expected ':' (", "correct this line"),
        ("x = 1", "file", "double.py has no function double", "define double"),
        ("double = 3", "file", "has a int instead of a function double", "define double"),
        ("def double(a, b): return a", "file", "double(a, b)", "give double the parameters"),
        ("import sys\nsys.exit(3)", "file", "SystemExit: 3 (", "remove the call that ends the process"),
        ("import no_such_module", "file", "ModuleNotFoundError: No module named 'no_such_module'", "look at this line"),
        ("import os\nos._exit(0)", "file", "the process ended with status 0", "look for os._exit"),
        ("def double(n): return 1 / 0", "returns", "ZeroDivisionError: division by zero (", "look at this line"),
        (
            "def double(n): raise NotImplementedError",
            "returns",
            "double raises NotImplementedError",
            "write double next",
        ),
        ("import os\ndef double(n): os.kill(os.getpid(), 9)", "returns", "signal 9 (SIGKILL)", "look for os._exit"),
        ("def double(n): return bytearray(1 << 34)", "returns", "MemoryError", "a tensor that grows"),
        ("def double(n): return n + n + 1", "value", "43", "multiply by two"),
    ],
)
def test_each_mistake_is_a_check_with_a_message(tmp_path, text, check, found, message):
    grading = grade_text(tmp_path, text)
    failure = grading.first_failure
    assert (failure.name, found in failure.found, message in failure.message) == (check, True, True), failure
    assert "Traceback" not in grading.output


def test_endless_loop_is_reported_with_its_line(tmp_path):
    failure = grade_text(tmp_path, "def double(n):\n    while True:\n        pass\n", limit=1.0).first_failure
    assert failure.name == "returns"
    assert "still running" in failure.found
    assert "in line 2: while True:" in failure.found or "in line 3: pass" in failure.found


def test_huge_output_is_cut_and_shown(tmp_path):
    grading = grade_text(tmp_path, "def double(n):\n    for _ in range(20000): print('x' * 500)\n    return 2 * n\n")
    assert grading.passed
    assert len(grading.output) < 20_000
    assert "more bytes of output were dropped" in grading.output


def test_forked_copy_neither_reports_nor_remains(tmp_path):
    text = (
        "import os, time\n"
        "def double(n):\n"
        "    pid = os.fork()\n"
        "    if pid: open('PID', 'w').write(str(pid))\n"
        "    else: time.sleep(600)\n"
        "    return 2 * n\n"
    ).replace("PID", str(tmp_path / "pid"))
    grading = grade_text(tmp_path, text)
    assert grading.passed
    assert len(grading.checks) == 3
    state = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


ESCAPE = (
    "import os, time\n"
    "def double(n):\n"
    "    if not os.fork():\n"
    "        os.setsid(); os.closerange(3, 1000)\n"
    "        if os.fork(): os._exit(0)\n"
    "        if os.fork(): open('PIDS', 'a').write(f'{os.getpid()} '); time.sleep(600)\n"
    "        open('PIDS', 'a').write(f'{os.getpid()} '); time.sleep(600)\n"
    "    os.wait()\n"
    "    while not os.path.exists('PIDS') or len(open('PIDS').read().split()) < 2: time.sleep(0.01)\n"
    "    return 2 * n\n"
)
"""Starts two processes in a session of their own, whose parents have ended, and returns when both run."""


@pytest.mark.parametrize("on_ranks", [False, True])
def test_processes_that_leave_the_session_end_with_the_grading(tmp_path, on_ranks):
    grading = grade_text(tmp_path, ESCAPE.replace("PIDS", str(tmp_path / "pids")), on_ranks)
    assert grading.passed
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) >= 2
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_folder_of_a_grading_that_was_killed_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stale = tmp_path / "meshwright-lab-killed"
    stale.mkdir()
    (stale / "lock").touch()
    assert grade_text(tmp_path, "def double(n): return 2 * n").passed
    assert [path.name for path in tmp_path.iterdir()] == ["double.py"]


def test_forked_copy_that_returns_does_not_report_again(tmp_path):
    grading = grade_text(tmp_path, "import os\ndef double(n):\n    os.fork()\n    return 2 * n\n")
    assert grading.passed
    assert len(grading.checks) == 3


def test_file_that_deletes_its_folder_is_graded(tmp_path):
    text = "import os, shutil\ndef double(n):\n    shutil.rmtree(os.path.dirname(__file__))\n    return 2 * n\n"
    folder = tmp_path / "practice"
    folder.mkdir()
    assert grade_text(folder, text).passed
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "found", "message"),
    [
        ("def double(n):\n    if n == 1: raise ValueError('no')\n    return n\n", "rank 1: ValueError: no (", "line 2"),
        ("import os\ndef double(n):\n    os._exit(5)\n", "exited with status 5", "os._exit"),
        ("import sys\ndef double(n):\n    sys.exit(5)\n", "SystemExit: 5", "ends the process"),
        ("def double(n):\n    raise NotImplementedError\n", "double raises NotImplementedError", "write double next"),
    ],
)
def test_mistake_on_a_rank_names_the_rank_and_the_line(tmp_path, text, found, message):
    failure = grade_text(tmp_path, text, on_ranks=True).first_failure
    assert found in failure.found, failure
    assert message in failure.message + failure.found, failure


def test_hang_names_the_line_of_every_rank(tmp_path):
    text = (
        "import torch, torch.distributed as dist\n"
        "def double(rank):\n"
        "    if rank == 0:\n"
        "        dist.recv(torch.ones(1), 1)\n"
        "    dist.recv(torch.ones(1), 1 - rank)\n"
    )
    failure = grade_text(tmp_path, text, on_ranks=True, limit=10.0).first_failure
    assert "rank 0 in line 4: dist.recv(torch.ones(1), 1)" in failure.found
    assert "rank 1 in line 5: dist.recv(torch.ones(1), 1 - rank)" in failure.found


def test_message_of_another_size_is_explained(tmp_path):
    text = (
        "import torch, torch.distributed as dist\n"
        "def double(rank):\n"
        "    dist.send(torch.ones(9), 1) if rank == 0 else dist.recv(torch.ones(2), 0)\n"
    )
    failure = grade_text(tmp_path, text, on_ranks=True).first_failure
    assert "SIGABRT" in failure.found
    assert "compare the sizes of both ends" in failure.message


def test_unreadable_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        grade(small_lab(), tmp_path / "none.py")
    (tmp_path / "large.py").write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="is larger than"):
        grade(small_lab(), tmp_path / "large.py")
    (tmp_path / "nul.py").write_bytes(b"x = 1\n\0")
    with pytest.raises(ConfigError, match="has a NUL byte at byte 6"):
        grade(small_lab(), tmp_path / "nul.py")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        grade(small_lab(), tmp_path / "binary.py")


def test_unknown_lab_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean ring_all_reduce"):
        find_lab("ring-allreduce")


def test_grading_leaves_this_process_as_it_was():
    """Nothing of the user's code runs here."""
    before = (os.getcwd(), torch.get_num_threads(), dist.is_initialized())
    assert grade(find_lab("ring_all_reduce"), shipped_file("ring_all_reduce", "solution")).passed
    assert (os.getcwd(), torch.get_num_threads(), dist.is_initialized()) == before
