"""Processes that a rank has started end with it, however it ends, and no other process does."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from meshwright.base.config import LaunchConfig
from meshwright.base.records.failures import RanksFailed
from meshwright.core.launch.descendants import MARK, close_inherited_files, end_descendants, with_mark
from meshwright.core.launch.ranks import Ranks

START = {
    "program": lambda: subprocess.Popen(["sleep", "1000"]).pid,
    "session": lambda: subprocess.Popen(["sleep", "1000"], start_new_session=True).pid,
    "fork": lambda: os.fork() or time.sleep(1000),
    "orphan": lambda: int(subprocess.check_output(["sh", "-c", "sleep 1000 >/dev/null & echo $!"])),
}
"""The ways in which a model or a dataset may start a process."""


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def start_all(_world, end: str, path: str):
    with open(path, "w") as file:
        for start in START.values():
            print(start(), file=file)
    os.replace(path, f"{path}.done")
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "fail":
        raise ValueError("the model fails")
    elif end == "stopped":
        time.sleep(1000)


LONG_ENDS = [pytest.param(end, marks=pytest.mark.long) for end in ("return", "fail", "stopped")]


@pytest.mark.parametrize("end", ["kill", *LONG_ENDS])
def test_processes_that_a_rank_has_started_end_with_it(tmp_path, end):
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        ranks = Ranks(start_all, 1, (end, str(tmp_path / "pids")))
        deadline = time.monotonic() + 60
        while not ranks.poll(0.1):
            assert time.monotonic() < deadline
            if end == "stopped" and (tmp_path / "pids.done").exists():
                ranks.kill()  # as after a second Ctrl-C
        if end == "return":
            ranks.results()
        else:
            with pytest.raises(RanksFailed):
                ranks.results()
        pids = [int(line) for line in (tmp_path / "pids.done").read_text().split()]
        assert len(pids) == len(START)
        assert not [pid for pid in pids if is_running(pid)]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_only_processes_with_the_mark_are_ended():
    marked, other = (
        subprocess.Popen(["sleep", "1000"], env=os.environ | {MARK: with_mark(mark)}) for mark in ("a-1", "a-10")
    )
    try:
        end_descendants("a-1")
        assert marked.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (marked, other):
            process.kill()
            process.wait()


def test_guard_closes_the_open_files_and_no_other_descriptor(monkeypatch):
    """The limit of open files may be 10^9, so that closing every descriptor up to it would take minutes."""
    closed = []
    with open(os.devnull) as file, monkeypatch.context() as patch:
        patch.setattr(os, "close", closed.append)
        close_inherited_files()
        opened = file.fileno()
    assert opened in closed
    assert min(closed) > 2
    assert len(closed) < 1000


def test_processes_of_ranks_end_when_the_launcher_is_killed(tmp_path):
    launcher = os.fork()
    if not launcher:
        ranks = Ranks(start_all, 1, ("stopped", str(tmp_path / "pids")), LaunchConfig(device="cpu"))
        while not ranks.poll(0.1):
            pass
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids.done").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    pids = [int(line) for line in (tmp_path / "pids.done").read_text().split()]
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_running(pid)]
