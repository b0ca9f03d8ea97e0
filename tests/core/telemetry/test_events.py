"""Event files: complete lines only, torn lines truncated, each record followed once, and a complete table of kinds."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import time
from pathlib import Path

import pytest

from meshwright.base.io import read_json, write_json
from meshwright.base.records.events import EVENT_KINDS, EventFollower, EventLog, read_events
from meshwright.base.records.run_folder import RunFolder
from meshwright.errors import ConfigError


def test_event_record_has_kind_attempt_rank_and_time(tmp_path):
    log = EventLog(tmp_path / "e.jsonl", attempt=2, rank=3)
    before = time.time()
    log.write("step", step=7, loss=1.5)
    (record,) = read_events(tmp_path / "e.jsonl")
    assert abs(record.pop("time") - before) < 60
    assert record == {"kind": "step", "attempt": 2, "rank": 3, "step": 7, "loss": 1.5}


@pytest.mark.parametrize("torn", [b'{"kind": "st', b"x" * 200_000])
def test_torn_last_line_is_truncated_by_the_next_attempt(tmp_path, torn):
    path = tmp_path / "e.jsonl"
    EventLog(path, 1, 0).write("step", step=0)
    with open(path, "ab") as file:
        file.write(torn)
    EventLog(path, 2, 0).write("step", step=1)
    assert [r["step"] for r in map(json.loads, path.read_text().splitlines())] == [0, 1]


def test_huge_file_without_line_ends_is_not_scanned_and_records_follow_it(tmp_path):
    path, size = tmp_path / "e.jsonl", 1 << 40
    with path.open("wb") as file:
        file.truncate(size)  # sparse; reading it would take minutes
    log = EventLog(path, 1, 0)
    follower = EventFollower(path, only_new=True)
    log.write("step", step=0)
    assert [event["step"] for event in follower.new_events()] == [0]
    assert path.stat().st_size < size + 100


def test_file_with_only_a_torn_line_becomes_empty(tmp_path):
    (tmp_path / "e.jsonl").write_bytes(b"half")
    EventLog(tmp_path / "e.jsonl", 1, 0)
    assert (tmp_path / "e.jsonl").read_bytes() == b""


def test_event_follower_yields_each_complete_record_once(tmp_path):
    path = tmp_path / "e.jsonl"
    follower = EventFollower(path)
    assert list(follower.new_events()) == []
    with open(path, "ab", buffering=0) as file:
        file.write(b'{"a": 1}\n{"a"')
        assert list(follower.new_events()) == [{"a": 1}]
        file.write(b": 2}\n")
        assert list(follower.new_events()) == [{"a": 2}]
        file.write(b'not json\n[1]\n{"a": 3}\n')
        assert list(follower.new_events()) == [{"a": 3}]


def test_event_follower_bounds_the_memory_of_a_line_without_end(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(b"x" * (5 << 20))
    follower = EventFollower(path)
    assert list(follower.new_events()) == []
    assert len(follower._partial) <= 2 << 20


def test_event_follower_with_only_new_skips_old_records(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'{"a": 1}\n{"torn')
    follower = EventFollower(path, only_new=True)
    EventLog(path, 1, 0).write("step")
    assert [e["kind"] for e in follower.new_events()] == ["step"]


def test_events_on_a_full_disk_are_counted_and_do_not_raise(tmp_path, monkeypatch, capsys):
    """The file ends after a complete line throughout, also after a write that stored a part of a line."""
    path, heard, lost = tmp_path / "events" / "e.jsonl", [], []
    log = EventLog(path, 1, 0, heard.append, lost.append)
    log.write("step", step=0)
    write = os.write

    def full_disk(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full_disk)
    log.write("step", step=1)
    monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:10]))
    log.write("step", step=2)
    assert path.read_bytes().count(b"\n") == 1
    assert path.read_bytes().endswith(b"\n")
    monkeypatch.setattr(os, "write", write)
    log.write("step", step=3)
    log.write("step", step=4)
    records = list(read_events(path))
    assert [(e["kind"], e.get("step", e.get("count"))) for e in records] == [
        ("step", 0), ("events_lost", 2), ("step", 3), ("step", 4),
    ]  # fmt: skip
    assert [event["step"] for event in heard] == [0, 1, 2, 3, 4]
    assert lost == [1, 2, 0]
    assert capsys.readouterr().err.count("cannot be written: No space left on device; the training continues") == 1


@pytest.mark.parametrize("stored", [0, 10])
def test_failed_append_keeps_the_records_that_a_successor_has_appended(tmp_path, monkeypatch, stored):
    """A fenced attempt may still run while the next one writes to the same file."""
    path = tmp_path / "e.jsonl"
    fenced, successor = EventLog(path, 1, 0), EventLog(path, 2, 0)
    fenced.write("step", step=0)
    successor.write("step", step=1)
    write = os.write

    def full_disk(file: int, content: bytes) -> int:
        if not stored:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content[:stored])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        fenced.write("step", step=2)
    successor.write("step", step=3)
    assert [event["step"] for event in read_events(path)] == [0, 1, 3]


def test_event_file_that_cannot_be_created_on_a_full_disk_is_created_later(tmp_path, monkeypatch):
    def full_disk(path, flags, *, follow=False):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr("meshwright.base.records.events.open_descriptor", full_disk)
        log = EventLog(tmp_path / "events" / "e.jsonl", 1, 0)
        log.write("step", step=0)
    log.write("step", step=1)
    assert [e["kind"] for e in read_events(tmp_path / "events" / "e.jsonl")] == ["events_lost", "step"]


def test_event_log_neither_follows_a_link_nor_creates_a_run_folder_that_is_gone(tmp_path):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "e.jsonl").symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match=r"e\.jsonl cannot be written: not a regular file"):
        EventLog(tmp_path / "e.jsonl", 1, 0)
    assert list(read_events(tmp_path / "e.jsonl")) == []
    assert (tmp_path / "outside").read_text() == "mine"
    with pytest.raises(ConfigError, match="No such file or directory"):
        EventLog(tmp_path / "gone" / "events" / "e.jsonl", 1, 0)
    assert not (tmp_path / "gone").exists()


def test_event_file_that_is_a_pipe_has_no_events(tmp_path):
    os.mkfifo(tmp_path / "e.jsonl")
    assert list(EventFollower(tmp_path / "e.jsonl", only_new=True).new_events()) == []


def test_run_folder_set_aside_deletes_nothing(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for number in (1, 2):
        folder.root.mkdir()
        (folder.root / "mark").write_text(str(number))
        folder.set_aside()
        assert not folder.root.exists()
    assert [(tmp_path / f"run.old-{n}" / "mark").read_text() for n in (1, 2)] == ["1", "2"]


def test_write_json_is_atomic_and_read_json_names_a_broken_file(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    assert read_json(tmp_path / "a.json") == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    (tmp_path / "b.json").write_text("{")
    for name in ("b.json", "missing.json"):
        with pytest.raises(ConfigError, match=name):
            read_json(tmp_path / name)


REPOSITORY = Path(__file__).parents[3]


def written_event_kinds() -> set[str]:
    """The first arguments of all `log.write("kind", ...)` and `write_event("kind", ...)` calls in the package."""
    kinds = set()
    for path in (REPOSITORY / "meshwright").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not re.search(r"\blog\.write$|\.write_event$", ast.unparse(node.func)):
                continue
            if node.args and isinstance(node.args[0], ast.Constant):
                kinds.add(node.args[0].value)
    return kinds


def test_event_kinds_lists_every_event_that_is_written():
    assert written_event_kinds() == set(EVENT_KINDS)


def test_docs_records_describes_every_event_kind():
    section = (REPOSITORY / "docs" / "records.md").read_text().partition("## Events")[2].partition("\n## ")[0]
    table = section.partition("| kind |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(EVENT_KINDS)
