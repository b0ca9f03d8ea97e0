"""The page of labs shows what the command prints, and lists every lab."""

from __future__ import annotations

import re
from pathlib import Path

from meshwright_practice.labs.registry import ORDER
from meshwright_practice.labs.texts import describe_grading

from tests.practice.labs.lab_gradings import WRONG, grade_file, shipped_file

PAGE = (Path(__file__).parents[3] / "docs" / "practice-labs.md").read_text()


def test_page_shows_the_grading_of_the_starter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("practice/ring_all_reduce.py")
    path.parent.mkdir()
    path.write_text(shipped_file("ring_all_reduce", "starter").read_text())
    shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert describe_grading(grade_file("ring_all_reduce", path), path) + "\n" == shown[0]


def test_page_shows_the_line_of_a_hang():
    shown = re.search(r"in line (\d+): (.+)", PAGE)
    source = (WRONG / "ring_all_reduce" / "10_blocking_sends.py").read_text().splitlines()
    assert source[int(shown[1]) - 1].strip() == shown[2]


def test_page_lists_every_lab_in_order():
    rows = re.findall(r"^\| `(\w{5,})` \| [^|]{20,} \|$", PAGE, re.MULTILINE)
    assert [row for row in rows if row in ORDER] == [*ORDER]
