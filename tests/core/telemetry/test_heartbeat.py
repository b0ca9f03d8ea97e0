"""The heartbeat: another process reads what a rank writes, also after the rank was killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from meshwright.base.records.heartbeat import (
    RECENT_COLLECTIVES,
    SIZE,
    Heartbeat,
    process_start,
    process_stat,
    read_heartbeat,
)
from meshwright.base.records.phases import TIMED_PHASES
from meshwright.errors import ConfigError


def test_heartbeat_shows_step_phase_and_collective(tmp_path):
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    heartbeat.enter("forward", 7)
    heartbeat.collective("control sum")
    heartbeat.set_waiting(True)
    heartbeat.set_signal(15)
    heartbeat.complete_step({"forward": 0.5, "sync": 0.25})
    reading = read_heartbeat(tmp_path / "heartbeat")
    assert (reading.pid, reading.process_started) == (os.getpid(), process_start(os.getpid()))
    assert (reading.step, reading.phase, reading.waiting, reading.signal) == (7, "forward", True, 15)
    assert (reading.collective_count, reading.collective, reading.recent_collectives) == (
        1,
        "control sum",
        {1: "control sum"},
    )
    assert reading.phase_seconds["forward"] == 0.5
    assert reading.location == "step 7, forward, waiting in control sum"


def test_collectives_do_not_count_as_beats(tmp_path):
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    before = read_heartbeat(tmp_path / "heartbeat").beats
    heartbeat.collective("x")
    assert read_heartbeat(tmp_path / "heartbeat").beats == before
    heartbeat.beat()
    heartbeat.enter("sync")
    assert read_heartbeat(tmp_path / "heartbeat").beats == before + 2


def test_heartbeat_remembers_recent_collectives(tmp_path):
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    for number in range(100):
        heartbeat.collective(f"sum {number} " + "x" * 60)
    reading = read_heartbeat(tmp_path / "heartbeat")
    assert sorted(reading.recent_collectives) == list(range(101 - RECENT_COLLECTIVES, 101))
    assert reading.recent_collectives[100].startswith("sum 99 ")


def test_heartbeat_outlives_a_killed_rank(tmp_path):
    code = "import sys,time; from pathlib import Path; from meshwright.base.records.heartbeat import Heartbeat\n"
    code += "heartbeat = Heartbeat(Path(sys.argv[1])); heartbeat.enter('backward', 42)\n"
    code += "print('x', flush=True); time.sleep(60)"
    rank = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "heartbeat")], stdout=subprocess.PIPE)
    rank.stdout.readline()
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    reading = read_heartbeat(tmp_path / "heartbeat")
    assert (reading.step, reading.phase) == (42, "backward")
    assert process_stat(reading.pid) == {}


def test_file_that_is_not_a_heartbeat_reads_as_none(tmp_path):
    for content in (b"", b"x" * SIZE, b"MESHBEAT", b"\0" * (SIZE - 1)):
        (tmp_path / "heartbeat").write_bytes(content)
        assert read_heartbeat(tmp_path / "heartbeat") is None
    assert read_heartbeat(tmp_path / "missing") is None
    assert len(TIMED_PHASES) == 8


def test_heartbeat_that_cannot_be_allocated_is_one_line(tmp_path, monkeypatch):
    def limited(*args):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", limited)
    with pytest.raises(ConfigError, match="heartbeat-00000 cannot be written: File too large; try "):
        Heartbeat(tmp_path / "heartbeat-00000")


def test_heartbeat_neither_replaces_a_file_nor_follows_a_link(tmp_path):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "heartbeat-00000").symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="File exists"):
        Heartbeat(tmp_path / "heartbeat-00000")
    assert read_heartbeat(tmp_path / "heartbeat-00000") is None
    assert (tmp_path / "outside").read_text() == "mine"
    os.mkfifo(tmp_path / "heartbeat-00001")
    assert read_heartbeat(tmp_path / "heartbeat-00001") is None


def test_lost_events_are_read_from_the_heartbeat(tmp_path):
    page = Heartbeat(tmp_path / "page")
    page.set_lost_events(3)
    assert read_heartbeat(tmp_path / "page").lost_events == 3
