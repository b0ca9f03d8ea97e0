"""A fork server that is stopped before it starts a rank is found, killed and named; its errors keep their class."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from small_run import small_config

from meshwright.errors import DataError
from meshwright.launch.fork_server import ForkServer
from meshwright.prover.recovery import NullViewer
from meshwright.recover.failures import RanksFailed
from meshwright.recover.incidents import read_incidents
from meshwright.recover.supervisor import supervise
from meshwright.telemetry.run_folder import RunFolder


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
    with pytest.raises(RanksFailed, match=r"the fork server has not started a rank within .* is stopped") as failed:
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
