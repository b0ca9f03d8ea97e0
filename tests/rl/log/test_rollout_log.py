"""The rollout log in files: round trips, segments, readers beside the writer, and one writer at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import BusyError, ConfigError, DataError
from meshwright.rl.log import frames, posix_log
from meshwright.rl.log.frames import RECORD_MAGIC, SEGMENT_HEADER
from meshwright.rl.log.interface import START, LogPosition, LogRecord
from tests.rl.log.rollout_logs import (
    PAYLOADS,
    RUN,
    damage_of,
    open_log,
    open_reader,
    payloads_of,
    segment_file,
    write_log,
)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=300) | st.just(RECORD_MAGIC * 5), max_size=5), max_size=8),
    st.integers(0, 2000),
)
def test_records_are_read_as_they_were_appended(groups, segment_bytes):
    with tempfile.TemporaryDirectory() as name:
        log, positions = open_log(Path(name), segment_bytes=segment_bytes), []
        for number, group in enumerate(groups):
            positions += log.append(group)
            if number % 3 == 2:
                log.close()
                log = open_log(Path(name), segment_bytes=segment_bytes)
                assert log.cut == ()
        payloads = [payload for group in groups for payload in group]
        assert positions == sorted(set(positions))
        reader = open_reader(Path(name))
        for opened in (log, reader):
            assert list(opened.scan()) == [LogRecord(*pair) for pair in zip(positions, payloads, strict=True)]
            assert [opened.read(position) for position in positions] == payloads
        assert reader.end == log.end
        for number, position in enumerate(positions):
            assert payloads_of(reader, position) == payloads[number:]
        log.close()


def test_append_is_one_write_and_one_fsync(tmp_path, monkeypatch):
    log = open_log(tmp_path)
    log.append([b"creates the segment"])
    calls = []
    for name in ("writev", "fsync"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, call=call: (calls.append(name), call(*args))[1])
    log.append([b"x" * 100] * 64)
    assert calls == ["writev", "fsync"]
    log.append([b"x"] * 2 * posix_log.MAX_BUFFERS)
    assert calls.count("fsync") == 2
    assert payloads_of(log)[-1] == b"x"
    log.close()


def test_partial_writes_are_completed(tmp_path, monkeypatch):
    log, writev = open_log(tmp_path), os.writev
    monkeypatch.setattr(os, "writev", lambda file, views: writev(file, [views[0][: max(1, len(views[0]) // 2)]]))
    log.append(PAYLOADS)
    assert payloads_of(log) == PAYLOADS
    log.close()


def test_segments_rotate_at_segment_bytes(tmp_path):
    positions = write_log(tmp_path, [b"x" * 400] * 6, segment_bytes=1000)
    assert [position.segment for position in positions] == [1, 1, 2, 2, 3, 3]
    assert [position.offset for position in positions[:2]] == [SEGMENT_HEADER.size, SEGMENT_HEADER.size + 472]
    assert open_reader(tmp_path).end == LogPosition(3, SEGMENT_HEADER.size + 2 * 472)


def test_position_before_a_rotation_continues_in_the_next_segment(tmp_path):
    log = open_log(tmp_path, segment_bytes=100)
    assert log.end == START
    log.append([b"x" * 200])
    end = log.end
    log.append([b"y"])
    assert payloads_of(log, end) == [b"y"]
    assert payloads_of(log, log.end) == []
    log.close()


def test_scan_of_a_log_that_ends_before_its_start_is_an_error(tmp_path):
    positions = write_log(tmp_path)
    reader = open_reader(tmp_path)
    for start in (LogPosition(1, reader.end.offset + 1), LogPosition(2, 0)):
        with pytest.raises(
            DataError, match=rf"(00000001|00000002).log.*ends before {start}; found its end at segment 1"
        ):
            list(reader.scan(start))
    with pytest.raises(DataError, match="ends before segment 1, offset 64"):
        list(open_reader(tmp_path / "empty").scan(positions[0]))


def test_position_is_json(tmp_path):
    assert LogPosition.from_json(LogPosition(3, 7).to_json()) == LogPosition(3, 7)
    for value in (None, [1], [1, "2"], [True, 2], [0, 0], [1, -1], [1, 2**63], {"segment": 1}):
        with pytest.raises(ValueError, match="log position"):
            LogPosition.from_json(value)


def test_readers_of_other_processes_follow_the_writer(tmp_path):
    code = (
        "import sys; from pathlib import Path; from rollout_logs import open_reader\n"
        "from meshwright.rl.log.interface import LogPosition\n"
        f"reader = open_reader(Path({str(tmp_path)!r}))\n"
        "for line in sys.stdin: print(reader.read(LogPosition(*map(int, line.split()))).decode(), flush=True)\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    reader = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    log = open_log(tmp_path, segment_bytes=500)
    for number in range(20):
        (position,) = log.append([b"record %d" % number + b"." * 100])
        reader.stdin.write(f"{position.segment} {position.offset}\n")
        reader.stdin.flush()
        assert reader.stdout.readline().startswith(f"record {number}.")
    reader.stdin.close()
    assert reader.wait(30) == 0
    reader.stdout.close()
    log.close()


def test_second_writer_is_refused_while_the_first_lives(tmp_path):
    log = open_log(tmp_path)
    with pytest.raises(BusyError, match=rf"rollouts is in use: process {os.getpid()} appends to the rollout log"):
        open_log(tmp_path)
    log.append([b"x"])
    log.close()
    with pytest.raises(BusyError, match="cannot append"):
        log.append([b"y"])
    second = open_log(tmp_path)
    assert payloads_of(second) == [b"x"]
    second.close()


def test_forked_processes_neither_append_nor_keep_the_lock(tmp_path):
    """The writer may die while the processes that it forked live on."""
    log = open_log(tmp_path)
    log.append([b"x"])
    wait_read, wait_write = os.pipe()
    told_read, told_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(wait_write)
        try:
            log.append([b"of the child"])
            os.write(told_write, b"appended")
        except BusyError:
            os.write(told_write, b"refused" if payloads_of(log) == [b"x"] else b"cannot read")
        os.read(wait_read, 1)
        os._exit(0)
    assert os.read(told_read, 20) == b"refused"
    log.close()
    second = open_log(tmp_path)  # the child still runs
    assert payloads_of(second) == [b"x"]
    second.close()
    os.close(wait_write)
    os.waitpid(child, 0)
    for file in (wait_read, told_read, told_write):
        os.close(file)


def test_file_that_another_process_has_extended_is_not_appended_to(tmp_path):
    log = open_log(tmp_path)
    log.append([b"x"])
    with segment_file(tmp_path).open("ab") as file:
        file.write(b"foreign")
    with pytest.raises(DataError, match=r"00000001.log was changed by another process: expected 137 bytes, found 144"):
        log.append([b"y"])
    log.close()


def test_record_that_is_too_long_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    log = open_log(tmp_path)
    monkeypatch.setattr(posix_log, "MAX_RECORD_BYTES", 10)
    with pytest.raises(DataError, match="a record of 11 bytes is too long"):
        log.append([b"x", b"x" * 11])
    assert log.end == START
    log.append([b"x" * 10])
    log.close()


def test_log_of_another_run_is_refused_with_both_runs(tmp_path):
    write_log(tmp_path)
    for opened in (lambda: open_log(tmp_path, "run-b"), lambda: list(open_reader(tmp_path, "run-b").scan())):
        with pytest.raises(DataError) as refused:
            opened()
        for text in ("00000001.log is the rollout log of another run", frames.digest_run_id(RUN).hex()):
            assert text in str(refused.value)
        assert frames.digest_run_id("run-b").hex() in str(refused.value)
    open_log(tmp_path).close()  # the lock of the refused writer is released


def test_newer_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "FORMAT", 2)
    write_log(tmp_path)
    monkeypatch.setattr(frames, "FORMAT", 1)
    for opened in (lambda: open_log(tmp_path), lambda: list(open_reader(tmp_path).scan())):
        with pytest.raises(DataError, match=r"00000001.log: expected format 1 or earlier, found format 2; try a newer"):
            opened()


@pytest.mark.parametrize("content", [b"hello", b"PK\x03\x04" + bytes(200), os.urandom(5000)])
def test_other_file_is_refused_and_kept(tmp_path, content):
    write_log(tmp_path, segment_bytes=0)
    path = segment_file(tmp_path, 5)
    path.write_bytes(content)
    for opened in (lambda: open_log(tmp_path), lambda: list(open_reader(tmp_path).scan())):
        with pytest.raises(DataError, match=r"00000005.log is not a rollout log: expected .* found "):
            opened()
    assert path.read_bytes() == content


def test_segment_that_was_copied_to_another_number_is_refused(tmp_path):
    write_log(tmp_path)
    segment_file(tmp_path, 2).write_bytes(segment_file(tmp_path).read_bytes())
    with pytest.raises(DataError, match=r"00000002.log is a copy of another segment: expected segment 2, found 1"):
        open_log(tmp_path)


def test_symbolic_links_and_pipes_are_not_followed(tmp_path):
    write_log(tmp_path / "other")
    run = tmp_path / "run"
    write_log(run, segment_bytes=0)
    segment_file(run, 2).unlink()
    segment_file(run, 2).symlink_to(segment_file(tmp_path / "other"))
    with pytest.raises(DataError, match="not a regular file"):
        open_log(run)
    segment_file(run, 2).unlink()
    os.mkfifo(segment_file(run, 2))
    with pytest.raises(DataError, match="not a regular file"):
        list(open_reader(run).scan())
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "rollouts").symlink_to(run / "rollouts")
    for opened in (open_log, open_reader):
        with pytest.raises(ConfigError, match="is a symbolic link; expected a folder"):
            opened(linked)


def test_segments_that_are_missing_are_named_once(tmp_path):
    write_log(tmp_path, [b"%d" % number for number in range(5)], segment_bytes=0)
    for number in (2, 3):
        segment_file(tmp_path, number).unlink()
    for opened in (open_reader(tmp_path), open_log(tmp_path)):
        (damage,) = damage_of(opened)
        assert damage.position == LogPosition(2, 0)
        assert damage.length is None
        assert "00000002.log and the 1 segments after it" in damage.reason
        assert payloads_of(opened) == [b"0", b"3", b"4"]
        with pytest.raises(DataError, match=r"00000002.log is missing"):
            opened.read(LogPosition(2, SEGMENT_HEADER.size))
