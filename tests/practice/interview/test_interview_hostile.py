"""Code that hangs, exits, prints much, takes memory or raises is named with its line, without a traceback of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from meshwright_practice.interview.exercise import default_options
from meshwright_practice.interview.report import check_file, report_text

from tests.practice.interview.notebook_sources import script

TRAIN = '    micro = config["micro_batch"]\n'


def found(tmp_path, text, gates=(15,), seconds=20.0):
    """What the first check that fails found."""
    path = tmp_path / "answer.py"
    path.write_text(text)
    report = check_file(path, default_options(), True, gates, seconds)
    assert "Traceback" not in report_text(report)
    return next(check for check in report.checks if not check.passed).found


def line_of(text, marker):
    return next(number for number, line in enumerate(text.splitlines(), 1) if marker in line)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("raise RuntimeError('my mistake')", "raised RuntimeError: my mistake"),
        pytest.param("import sys; sys.exit(3)", "called sys.exit(3)", marks=pytest.mark.long),
        ("os._exit(4)", "called os._exit(4)"),
        ("print('x' * (80 << 20))", "raised OSError"),
        pytest.param("torch.zeros(1 << 32)", "raised RuntimeError", marks=pytest.mark.long),
        pytest.param("input()", "raised EOFError", marks=pytest.mark.long),
        pytest.param("import no_such_module", "raised ModuleNotFoundError", marks=pytest.mark.long),
    ],
)
def test_end_of_the_users_code_is_named_with_its_line(tmp_path, statement, said):
    text = script("good", (TRAIN, f"{TRAIN}    {statement}  # here\n"))
    answer = found(tmp_path, text)
    assert said in answer
    assert f"line {line_of(text, '# here')}:" in answer


def test_hang_is_ended_and_named_with_its_line(tmp_path):
    text = script("good", (TRAIN, f"{TRAIN}    time.sleep(3600)  # here\n"))
    answer = found(tmp_path, text, seconds=1.5)
    assert "did not end within 1.5 s" in answer
    assert f"line {line_of(text, '# here')}:" in answer


def test_crash_of_the_process_is_named_with_its_line(tmp_path):
    text = script("good", (TRAIN, f"{TRAIN}    import ctypes; ctypes.string_at(0)  # here\n"))
    answer = found(tmp_path, text)
    assert "SIGSEGV" in answer
    assert f"line {line_of(text, '# here')}:" in answer


def test_rank_that_leaves_a_collective_out_is_named(tmp_path):
    text = script(
        "good",
        (
            "                    dist.all_reduce(parameter.grad)",
            "                    rank or dist.all_reduce(parameter.grad)",
        ),
    )
    answer = found(tmp_path, text, gates=(30,), seconds=3.0)
    assert "rank 0 of 2" in answer or "rank 1 of 2" in answer


def test_failure_of_one_rank_is_not_hidden_by_the_others(tmp_path):
    text = script("good", ("            total = 0.0\n", "            total = 0.0 if rank == 0 else 1 / 0  # here\n"))
    answer = found(tmp_path, text, gates=(30,))
    assert "rank 1 of 2 raised ZeroDivisionError" in answer
    assert f"line {line_of(text, '# here')}:" in answer


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('    return {"losses": losses}', "    return losses", "expected a dict"),
        ('    return {"losses": losses}', '    return {"losses": [1.0]}', "40 steps and 1 losses"),
        ("batch = fetch(mine", "batch = FETCH(mine", "40 steps"),
    ],
)
def test_wrong_use_of_the_contract_is_explained(tmp_path, old, new, said):
    text = script("good", (old, new)).replace("def partition(", "FETCH = fetch\n\n\ndef partition(")
    assert said in found(tmp_path, text)


def test_files_of_the_users_code_stay_in_the_scratch_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = script("good", (TRAIN, f"{TRAIN}    open('left_behind', 'w').close()\n"))
    path = tmp_path / "answer.py"
    path.write_text(text)
    assert check_file(path, default_options(), True, (15,), 60).passed
    assert {each.name for each in tmp_path.iterdir()} == {"answer.py"}


def test_process_that_leaves_the_session_ends_with_the_probe(tmp_path):
    pids = tmp_path / "pids"
    lines = (
        "if not os.fork():",
        "    os.setsid(); os.closerange(3, 1000)",
        "    if not os.fork():",
        f"        open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)",
        "    os._exit(0)",
        "os.wait()",
        f"while not os.path.exists({str(pids)!r}): time.sleep(0.01)",
        "raise RuntimeError('after the fork')",
    )
    text = script("good", (TRAIN, TRAIN + "".join(f"    {line}\n" for line in lines)))
    assert "after the fork" in found(tmp_path, text)
    started = pids.read_text().split()
    assert started
    assert not [pid for pid in started if Path("/proc", pid).exists()]
