"""Hosts that share nothing but a bucket: leases, beats, incidents and checkpoints are objects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from meshwright import train
from meshwright.base.checkpoint.listing import list_leases, list_published
from meshwright.base.store.object_store import ObjectStore
from meshwright.core.checkpoint.unsharded import state_digest
from tests.kit.small_run import SMALL, small_config

STEPS = 60
OPTIONS = ("--checkpoint.every=10", "--checkpoint.seconds=0", "--eval.every=0", "--launch.host_timeout=10")
SECRET = "0123456789abcdef0123456789abcdef"
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def start_host(name: str, url: str, home) -> subprocess.Popen:
    command = [sys.executable, "-m", "meshwright", "train", "--run", url, "--ranks", "2", "--steps", str(STEPS)]
    environment = {
        "MESHWRIGHT_JOB_SECRET": SECRET,
        "MESHWRIGHT_HOST_NAME": name,
        "MESHWRIGHT_HOST_ADDRESS": "127.0.0.1",
        "MESHWRIGHT_HOME": str(home / name),
        "MESHWRIGHT_FAULT": "step.update:rank0:slow=0.1x99",
        "OMP_NUM_THREADS": "1",
    }
    with open(home / f"{name}.log", "ab") as log:
        return subprocess.Popen(
            [*command, "--launch.hosts=2", *SMALL, *OPTIONS], env=os.environ | environment, stdout=log, stderr=log
        )


def test_job_whose_hosts_share_only_a_bucket_survives_the_loss_of_its_leader(s3, url, tmp_path):
    golden = train(small_config(*OPTIONS, steps=STEPS), run=tmp_path / "golden", quiet=True)
    hosts = {name: start_host(name, url, tmp_path) for name in "abc"}
    store = ObjectStore(url)
    deadline = time.monotonic() + 120
    try:
        while not list_published(store):
            assert time.monotonic() < deadline, [(tmp_path / f"{name}.log").read_text() for name in "abc"]
            time.sleep(0.5)
        leader = list_leases(store)[0][1]["host"]
        hosts[leader].send_signal(signal.SIGKILL)
        hosts.pop(leader).wait()
        codes = {name: process.wait(150) for name, process in hosts.items()}
        logs = [(tmp_path / f"{name}.log").read_text() for name in "abc"]
        assert set(codes.values()) == {0}, logs
    finally:
        for process in hosts.values():
            process.kill()
    newest = list_published(store)[0]
    assert newest.step == STEPS
    assert state_digest(newest)
    assert any(golden.digest[:16] in log for log in logs), logs
    assert [lease["host"] for _, lease in list_leases(store)][-1] == leader
