"""Events are whole lines or nothing; a torn line is cut; a follower sees each record once."""

from __future__ import annotations

import json

import pytest

from meshwright.errors import ConfigError
from meshwright.io import read_json, write_json
from meshwright.telemetry.events import EventFollower, EventLog, completed_steps, read_events
from meshwright.telemetry.run_folder import RunFolder


def test_a_record_carries_its_kind_attempt_and_rank(tmp_path):
    log = EventLog(tmp_path / "e.jsonl", attempt=2, rank=3)
    log.write("step", step=7, loss=1.5)
    assert list(read_events(tmp_path / "e.jsonl")) == [
        {"kind": "step", "attempt": 2, "rank": 3, "step": 7, "loss": 1.5}
    ]


@pytest.mark.parametrize("torn", [b'{"kind": "st', b"x" * 200_000])
def test_a_torn_last_line_is_cut_by_the_next_attempt(tmp_path, torn):
    path = tmp_path / "e.jsonl"
    EventLog(path, 1, 0).write("step", step=0)
    with open(path, "ab") as file:
        file.write(torn)
    EventLog(path, 2, 0).write("step", step=1)
    assert [r["step"] for r in map(json.loads, path.read_text().splitlines())] == [0, 1]


def test_a_file_that_is_only_a_torn_line_becomes_empty(tmp_path):
    (tmp_path / "e.jsonl").write_bytes(b"half")
    EventLog(tmp_path / "e.jsonl", 1, 0)
    assert (tmp_path / "e.jsonl").read_bytes() == b""


def test_a_follower_sees_each_record_once_and_never_half_of_one(tmp_path):
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


def test_a_line_without_end_takes_no_unbounded_memory(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(b"x" * (5 << 20))
    follower = EventFollower(path)
    assert list(follower.new_events()) == []
    assert len(follower._rest) <= 2 << 20


def test_a_follower_of_new_records_skips_the_old(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_bytes(b'{"a": 1}\n{"torn')
    follower = EventFollower(path, only_new=True)
    EventLog(path, 1, 0).write("step")
    assert [e["kind"] for e in follower.new_events()] == ["step"]


def test_the_last_attempt_that_made_a_step_is_the_ledger(tmp_path):
    path = tmp_path / "e.jsonl"
    for attempt, steps in ((1, (0, 1, 2)), (2, (1, 2))):
        log = EventLog(path, attempt, 0)
        for step in steps:
            log.write("step", step=step)
        log.write("eval", step=1)
        log.close()
    assert {step: event["attempt"] for step, event in completed_steps(path).items()} == {0: 1, 1: 2, 2: 2}


def test_setting_aside_deletes_nothing(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for number in (1, 2):
        folder.root.mkdir()
        (folder.root / "mark").write_text(str(number))
        folder.set_aside()
        assert not folder.root.exists()
    assert [(tmp_path / f"run.old-{n}" / "mark").read_text() for n in (1, 2)] == ["1", "2"]


def test_json_is_replaced_whole_and_a_broken_one_is_named(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    assert read_json(tmp_path / "a.json") == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    (tmp_path / "b.json").write_text("{")
    for name in ("b.json", "missing.json"):
        with pytest.raises(ConfigError, match=name):
            read_json(tmp_path / name)
