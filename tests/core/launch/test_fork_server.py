"""A fork server that is stopped before it starts a rank is found, killed and named; its errors keep their class."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time

import pytest

from meshwright.base.config import config_to_dict
from meshwright.base.records.failures import RanksFailed
from meshwright.base.records.incidents import read_incidents
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.launch.descendants import MARK, with_mark
from meshwright.core.launch.fork_server import ForkServer
from meshwright.core.recover.supervisor import supervise
from meshwright.errors import DataError, StoppedBeforeStart
from meshwright.prover.claims import NullViewer
from tests.kit.small_run import small_config


def train(config, folder, server):
    try:
        return supervise(folder, config.launch, server.start, lambda _attempt: NullViewer(), report=lambda _text: None)
    finally:
        server.close()


def test_fork_server_stopped_before_ranks_exist_is_reported_as_a_hang(tmp_path):
    config = small_config("--launch.rendezvous_timeout=1", "--launch.restarts=0", steps=2)
    folder = RunFolder(tmp_path / "run")
    server = ForkServer(config, folder, fork=False, fallback=True)

    def stop_server():
        while server._process is None:
            time.sleep(0.001)
        os.kill(server.launcher_pid, signal.SIGSTOP)

    stopper = threading.Thread(target=stop_server)
    stopper.start()
    start = time.monotonic()
    with pytest.raises(
        RanksFailed, match=r"not started a rank within .*\(launch.rendezvous_timeout\).* is stopped"
    ) as failed:
        train(config, folder, server)
    stopper.join()
    assert time.monotonic() - start < 30
    assert failed.value.exit_code == 8
    [incident] = read_incidents(folder)
    assert (incident.outcome, incident.rank, incident.exit_code) == ("hang", None, 8)


def test_error_in_the_fork_server_keeps_its_class(tmp_path):
    config = small_config("--data.kind=text", "--data.path=/nowhere", steps=2)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(DataError, match="/nowhere"):
        train(config, folder, ForkServer(config, folder, fork=False, fallback=True))


def start_stopped(tmp_path, *overrides):
    """A fork server that is stopped before it reads its job."""
    config = small_config("--launch.grace_period=0.5", *overrides, steps=2)
    folder = RunFolder(tmp_path / "run")
    folder.attempt(1).mkdir(parents=True)
    server = ForkServer(config, folder, fork=False, fallback=True)
    real = subprocess.Popen

    def popen(*args, **options):
        process = real(*args, **options)
        process.send_signal(signal.SIGSTOP)
        return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        server.start(1, 0)
    return server


def test_close_kills_a_fork_server_that_is_stopped(tmp_path):
    server = start_stopped(tmp_path)
    process, server._busy = server._process, False  # as if the result of the last attempt had been read
    server.close()
    assert process.returncode == -signal.SIGKILL


def test_signal_ends_a_fork_server_that_is_stopped(tmp_path):
    server = start_stopped(tmp_path)
    server.signal(signal.SIGTERM)
    while not server.poll(1):
        pass
    with pytest.raises(StoppedBeforeStart, match="signal 15 before the first step") as stopped:
        server.results()
    assert stopped.value.exit_code == 143
    server.close()


def test_fork_server_that_was_killed_is_not_reported_as_stopped_by_a_signal(tmp_path):
    server = start_stopped(tmp_path)
    server._sent_signal = signal.SIGTERM
    (tmp_path / "run" / "attempts" / "0001" / "heartbeat-00000").touch()  # a rank has started
    server.kill()
    while not server.poll(1):
        pass
    with pytest.raises(RanksFailed, match="the fork server was killed by signal 9"):
        server.results()
    server.close()


def test_large_job_does_not_wait_for_a_fork_server_that_is_stopped(tmp_path):
    tables = ", ".join('{kind="synthetic", samples=1000, weight=1.0}' for _ in range(1000))
    server = start_stopped(tmp_path, f"--data.mixture=[{tables}]")
    assert len(json.dumps(config_to_dict(server._config))) > 1 << 16  # more than a pipe has room for
    server.close()


def test_processes_of_a_killed_fork_server_are_ended(tmp_path):
    server = start_stopped(tmp_path)
    environment = os.environ | {MARK: with_mark(server._mark)}
    left = subprocess.Popen(["sleep", "1000"], env=environment, start_new_session=True)
    server.kill()
    assert left.wait(10) == -signal.SIGKILL
    server.close()
