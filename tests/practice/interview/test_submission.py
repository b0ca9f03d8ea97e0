"""Reading a submission runs nothing, skips and reports magics, names what is missing, and bounds what it reads."""

from __future__ import annotations

import json

import pytest
from meshwright_practice.interview.exercise import CONTRACT, prompt_text
from meshwright_practice.interview.starter import starter_text, write_starter
from meshwright_practice.interview.submission import read_submission

from meshwright.errors import ConfigError
from tests.practice.interview.notebook_sources import NOTEBOOKS


def write_notebook(path, *cells, **changes):
    made = [{"cell_type": "code", "metadata": {}, "source": cell} for cell in cells]
    path.write_text(json.dumps({"cells": made, "nbformat": 4, "nbformat_minor": 5, "metadata": {}} | changes))
    return path


def test_lines_of_a_notebook_are_named_by_cell():
    submission = read_submission(NOTEBOOKS / "good.ipynb")
    number = next(n for n, line in enumerate(submission.source.splitlines(), 1) if line.startswith("def partition"))
    assert submission.place(number).startswith("good.ipynb, cell 3, line ")
    assert submission.missing(tuple(CONTRACT)) == []


def test_magics_and_shell_lines_are_skipped_and_reported(tmp_path):
    path = write_notebook(
        tmp_path / "a.ipynb",
        "%matplotlib inline\nx = 1\nif x:\n    !pip install torch\nfiles = !ls\nx?",
        "%%bash\nrm -rf /",
        ["%%time\n", "y = 2\n"],
        "text = '''\n%not a magic\n'''",
    )
    submission = read_submission(path)
    namespace = {}
    exec(submission.source, namespace)
    assert (namespace["x"], namespace["y"], namespace["files"]) == (1, 2, None)
    assert "%not a magic" in namespace["text"]
    assert len(submission.remarks) == 6
    assert any("cell 2 is skipped" in remark for remark in submission.remarks)


def test_reading_runs_nothing(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("raise SystemExit('ran')\n")
    assert read_submission(path).functions == {}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "add def partition(num_samples, rank, world_size, epoch, seed) -> list[int]"),
        ("def partition(n, rank): ...", "partition takes (n, rank); expected"),
        ("def train(config):\n    partition = 1", "add def partition"),
        ("def partition(a, b, c, d, e, *, f): ...", "partition takes"),
    ],
)
def test_missing_function_is_named_with_what_to_add(tmp_path, source, said):
    path = tmp_path / "a.py"
    path.write_text(source)
    assert said in read_submission(path).missing(("partition",))[0]


@pytest.mark.parametrize(
    "source", ["def partition(a, b, c, d, e=1): ...", "def partition(*args): ...", "from other import partition"]
)
def test_function_that_can_be_called_is_accepted(tmp_path, source):
    path = tmp_path / "a.py"
    path.write_text(source)
    assert read_submission(path).missing(("partition",)) == []


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "neither a script nor a notebook"),
        ("a.ipynb", b"{", "not JSON"),
        ("a.ipynb", b"[]", "not a notebook of format 4"),
        ("a.ipynb", b'{"nbformat": 3, "worksheets": []}', "not a notebook of format 4"),
        ("a.ipynb", b'{"nbformat": 4, "cells": [{"cell_type": "code", "source": 3}]}', "cell 1 has no source"),
        ("a.ipynb", b'{"nbformat": 4, "cells": []}', "no code cell"),
        ("a.ipynb", b"[" * 100_000, "levels of nesting"),
        ("a.py", b"x = = 1\n", "line 1: invalid syntax"),
        ("a.py", b"\xff\xfe", "not text in UTF-8"),
        ("a.py", b"-" * 200_000 + b"1", r"the file: \w"),
        ("a.py", b"x" * (5 << 20), "larger than"),
    ],
)
def test_file_that_is_no_submission_is_refused_in_one_line(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_submission(path)


def test_starter_has_every_signature_and_is_never_overwritten(tmp_path):
    path = write_starter(tmp_path / "new")
    assert path.read_text() == starter_text()
    assert read_submission(path).missing(tuple(CONTRACT)) == []
    with pytest.raises(ConfigError, match="exists"):
        write_starter(tmp_path / "new")
    assert all(function.signature in prompt_text() for function in CONTRACT.values())


def test_byte_order_mark_is_accepted(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes(b"\xef\xbb\xbfdef f(): pass\n")
    assert "f" in read_submission(path).functions
