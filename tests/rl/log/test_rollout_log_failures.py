"""Appends to a rollout log that fail: a full disk, limits, faults, and a writer that is killed."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.core.faults import InjectedFault
from meshwright.errors import ConfigError
from meshwright.rl.log import posix_log
from meshwright.rl.log.interface import START
from tests.rl.log.rollout_logs import PAYLOADS, damage_of, open_log, open_reader, payloads_of, segment_file, write_log


@pytest.mark.parametrize("segment_bytes", [0, 1 << 20], ids=["new segment", "same segment"])
@pytest.mark.parametrize("written", [0, 1, 63, 64, 65, 71, 72, 136, 200, 300])
def test_full_disk_appends_nothing_and_a_later_append_works(tmp_path, monkeypatch, segment_bytes, written):
    """The disk takes some bytes of the append, then it is full."""
    write_log(tmp_path, segment_bytes=segment_bytes)
    log = open_log(tmp_path, segment_bytes=segment_bytes)
    before, files = log.end, sorted(os.listdir(tmp_path / "rollouts"))

    def write_a_part(file, buffers):
        os.write(file, b"".join(buffers)[:written])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(posix_log, "write_all", write_a_part)
        for _ in range(2):
            with pytest.raises(ConfigError) as failed:
                log.append([b"x" * 100, b"y" * 100])
            path = segment_file(tmp_path, before.segment + (segment_bytes == 0))
            assert f"{path} cannot be written: No space left on device" in str(failed.value)
            assert "2 records were not appended" in str(failed.value)
            assert "try to free space on the disk" in failed.value.hint
            assert log.end == before
            assert sorted(os.listdir(tmp_path / "rollouts")) == files
            for opened in (log, open_reader(tmp_path)):
                assert payloads_of(opened) == PAYLOADS
                assert damage_of(opened) == []
    log.append([b"z"])
    assert payloads_of(log) == [*PAYLOADS, b"z"]
    log.close()


def test_file_size_limit_is_named_and_a_later_append_works(tmp_path):
    """A write of the kernel that takes a part: RLIMIT_FSIZE behaves as a disk that fills up."""
    write_log(tmp_path)
    log = open_log(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = segment_file(tmp_path).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"00000001.log cannot be written: File too large.*ulimit -f"):
            log.append([b"x" * 500])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert segment_file(tmp_path).stat().st_size == size
    log.append([b"x" * 500])
    assert payloads_of(log) == [*PAYLOADS, b"x" * 500]
    log.close()


@pytest.mark.parametrize("call", ["fsync", "ftruncate", "unlink"])
@pytest.mark.parametrize("segment_bytes", [0, 1 << 20], ids=["new segment", "same segment"])
def test_append_that_cannot_be_undone_is_undone_by_the_next(tmp_path, monkeypatch, call, segment_bytes):
    write_log(tmp_path, segment_bytes=segment_bytes)
    log = open_log(tmp_path, segment_bytes=segment_bytes)

    def fail(*_args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        for name in {"fsync", call}:
            broken.setattr(os, name, fail)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"\d.log cannot be written: Input/output error"):
                log.append([b"x" * 100])
    assert log.append([b"z"])
    assert payloads_of(log) == [*PAYLOADS, b"z"]
    assert damage_of(log) == []
    log.close()
    log = open_log(tmp_path)
    assert log.cut == ()
    assert payloads_of(log) == [*PAYLOADS, b"z"]
    log.close()


def test_faults_at_the_fail_points(tmp_path, arm):
    log = open_log(tmp_path)
    arm("rollout.append:enospc@step2,rollout.append:raise@step3,rollout.committed:raise@step4")
    log.append([b"1"])
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        log.append([b"2"])
    with pytest.raises(InjectedFault):
        log.append([b"3"])
    assert payloads_of(log) == [b"1"]
    with pytest.raises(InjectedFault):
        log.append([b"4"])
    log.append([b"5"])
    assert payloads_of(log) == [b"1", b"4", b"5"]
    log.close()


def test_interrupted_append_is_undone(tmp_path, monkeypatch):
    log = open_log(tmp_path)

    def interrupt(file, buffers):
        os.write(file, buffers[0])
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(posix_log, "write_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.append([b"x"])
    assert log.end == START
    assert not segment_file(tmp_path).exists()
    log.append([b"y"])
    assert payloads_of(log) == [b"y"]
    log.close()


def test_folder_that_cannot_be_created_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent/rollouts cannot be written: No such file"):
        open_log(tmp_path / "absent")


WRITER = """
import random, sys
from pathlib import Path
from meshwright.core import faults
from rollout_logs import open_log
root, seed = Path(sys.argv[1]), int(sys.argv[2])
faults.arm(0, 0)
chance, number = random.Random(seed), int(sys.argv[3])
log = open_log(root, segment_bytes=20_000)
while True:
    group = [b"%d:" % (number + k) + chance.randbytes(chance.randrange(3000)) for k in range(chance.randrange(1, 5))]
    log.append(group)
    number += len(group)
    print(number, flush=True)
"""


def run_writer(root: Path, seed: int, first: int, fault: str = "") -> subprocess.Popen:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "MESHWRIGHT_FAULT": fault,
    }
    command = [sys.executable, "-c", WRITER, str(root), str(seed), str(first)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def require_numbers(log, acknowledged: int) -> int:
    """The number of records in the log, which are consecutive, and at least those that were acknowledged."""
    assert damage_of(log) == []
    numbers = [int(payload.partition(b":")[0]) for payload in payloads_of(log)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= acknowledged
    return len(numbers)


def test_every_acknowledged_record_is_there_after_the_writer_is_killed(tmp_path):
    chance, total = random.Random(7), 0
    for seed in range(6):
        writer = run_writer(tmp_path, seed, total)
        lines = [writer.stdout.readline()]
        deadline = time.monotonic() + chance.uniform(0.0, 0.3)
        while time.monotonic() < deadline:
            lines.append(writer.stdout.readline())
        os.kill(writer.pid, signal.SIGKILL)
        lines += writer.stdout.readlines()
        writer.stdout.close()
        writer.wait(30)
        acknowledged = int(next(line for line in reversed(lines) if line.endswith(b"\n")))
        assert acknowledged > total
        log = open_log(tmp_path)
        total = require_numbers(log, acknowledged)
        log.close()
    assert len(list((tmp_path / "rollouts").glob("*.log"))) > 1


@pytest.mark.parametrize(("point", "lost"), [("rollout.append", True), ("rollout.committed", False)])
def test_writer_that_is_killed_at_a_fail_point(tmp_path, point, lost):
    writer = run_writer(tmp_path, 1, 0, f"{point}:kill@step5")
    acknowledged = [int(line) for line in writer.stdout.readlines()]
    writer.stdout.close()
    assert writer.wait(30) == -signal.SIGKILL
    assert len(acknowledged) == 4
    log = open_log(tmp_path)
    found = require_numbers(log, acknowledged[-1])
    assert (found == acknowledged[-1]) == lost
    log.close()
