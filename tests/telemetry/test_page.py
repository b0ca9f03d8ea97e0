"""The heartbeat page: what a rank writes, another process reads, also after the rank is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from meshwright.telemetry.heartbeat import (
    PHASES,
    RECENT_COLLECTIVES,
    SIZE,
    Heartbeat,
    process_start,
    process_stat,
    read_heartbeat,
)


def test_a_page_tells_where_its_rank_is(tmp_path):
    page = Heartbeat(tmp_path / "page")
    page.enter("forward", 7)
    page.collective("control sum")
    page.set_waiting(True)
    page.set_signal(15)
    page.complete_step({"forward": 0.5, "sync": 0.25})
    seen = read_heartbeat(tmp_path / "page")
    assert (seen.pid, seen.process_started) == (os.getpid(), process_start(os.getpid()))
    assert (seen.step, seen.phase, seen.waiting, seen.signal) == (7, "forward", True, 15)
    assert (seen.collective_count, seen.collective, seen.recent_collectives) == (1, "control sum", {1: "control sum"})
    assert seen.phase_seconds["forward"] == 0.5
    assert seen.location == "step 7, forward, waiting in control sum"


def test_only_a_beat_moves_the_beats(tmp_path):
    page = Heartbeat(tmp_path / "page")
    before = read_heartbeat(tmp_path / "page").beats
    page.collective("x")
    assert read_heartbeat(tmp_path / "page").beats == before
    page.beat()
    page.enter("sync")
    assert read_heartbeat(tmp_path / "page").beats == before + 2


def test_the_last_collectives_are_remembered(tmp_path):
    page = Heartbeat(tmp_path / "page")
    for number in range(100):
        page.collective(f"sum {number} " + "x" * 60)
    seen = read_heartbeat(tmp_path / "page")
    assert sorted(seen.recent_collectives) == list(range(101 - RECENT_COLLECTIVES, 101))
    assert seen.recent_collectives[100].startswith("sum 99 ")


def test_a_page_outlives_a_killed_rank(tmp_path):
    code = "import sys,time; from pathlib import Path; from meshwright.telemetry.heartbeat import Heartbeat\n"
    code += "page = Heartbeat(Path(sys.argv[1])); page.enter('backward', 42); print('x', flush=True); time.sleep(60)"
    rank = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "page")], stdout=subprocess.PIPE)
    rank.stdout.readline()
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    seen = read_heartbeat(tmp_path / "page")
    assert (seen.step, seen.phase) == (42, "backward")
    assert process_stat(seen.pid) == {}


def test_what_is_no_page_is_none(tmp_path):
    for content in (b"", b"x" * SIZE, b"MESHBEAT", b"\0" * (SIZE - 1)):
        (tmp_path / "page").write_bytes(content)
        assert read_heartbeat(tmp_path / "page") is None
    assert read_heartbeat(tmp_path / "missing") is None
    assert len(PHASES) == 8
