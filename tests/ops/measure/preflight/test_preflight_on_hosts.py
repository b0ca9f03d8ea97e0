"""A preflight by the supervisors of a job: every host gets the same report, and a slow host can be left out."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kit.small_run import SMALL

ENVIRONMENT = {
    "MESHWRIGHT_JOB_SECRET": "0123456789abcdef0123456789abcdef",
    "MESHWRIGHT_HOST_ADDRESS": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
}


def start(name: str, *args: str, fault: str = "") -> subprocess.Popen:
    environment = ENVIRONMENT | {"MESHWRIGHT_HOST_NAME": name, "MESHWRIGHT_FAULT": fault}
    command = [sys.executable, "-m", "meshwright", *args]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.timeout(180)
def test_every_host_gets_the_same_report_of_all_hosts(tmp_path):
    args = ("preflight", "--hosts", "2", "--ranks", "2", "--seconds", "2", "--run", str(tmp_path / "run"), "--json")
    hosts = [start(name, *args) for name in "ab"]
    outputs = [host.communicate(timeout=150) for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    reports = [json.loads(output) for output, _ in outputs]
    assert reports[0] == reports[1]
    assert {rank["host"] for rank in reports[0]["measurements"]["ranks"]} == {"a", "b"}
    assert len(reports[0]["measurements"]["pairs"]) == 1
    assert list(tmp_path.glob("run.preflight*")) == []


@pytest.mark.long
@pytest.mark.timeout(280)
def test_slow_host_is_left_out_and_a_spare_takes_its_place(tmp_path):
    args = ("train", "--run", str(tmp_path / "run"), "--ranks", "2", "--steps", "5", "--launch.hosts=2", *SMALL)
    hosts = [
        start(name, *args, "--launch.preflight=exclude", fault="preflight.matmul:rank1:slow=0.2") for name in "abc"
    ]
    outputs = [host.communicate(timeout=250) for host in hosts]
    assert sorted(host.returncode for host in hosts) == [0, 0, 8], outputs
    left_out = next(error for host, (_, error) in zip(hosts, outputs, strict=True) if host.returncode == 8)
    assert "the preflight leaves this host out: matmul rate is slow" in left_out
