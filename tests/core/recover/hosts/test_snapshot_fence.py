"""The supervisor of a host fences snapshots: it accepts none of an attempt that is over or has lost its leader."""

from __future__ import annotations

import threading
import time

import pytest

from meshwright.base.config import LaunchConfig
from meshwright.base.records.run_folder import RunFolder
from meshwright.core.channel import Listener
from meshwright.core.recover.hosts.election import LeaseView
from meshwright.core.recover.hosts.leader import HostsPolicy
from meshwright.core.recover.hosts.messages import encode_message
from meshwright.core.recover.hosts.supervise_hosts import HostSupervisor
from meshwright.core.store.memory.client import KeeperAddress, KeeperClient
from meshwright.core.store.memory.keeper import SnapshotKeeper

SECRET = b"0123456789abcdef0123456789abcdef"
FILE = "checkpoints/step-00000007.a0004/rank-00000.shard"


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_HOST_NAME", "b")
    monkeypatch.setenv("MESHWRIGHT_HOST_ADDRESS", "127.0.0.1")
    (tmp_path / "memory").mkdir()
    policy = HostsPolicy(2, 2, 1, 5.0, 5.0, False, lambda _hosts: "")
    launch = LaunchConfig(hosts=2, host_timeout=5.0)
    supervisor = HostSupervisor(
        RunFolder(tmp_path / "run"),
        launch,
        launcher=None,
        make_viewer=None,
        policy=policy,
        secret=SECRET,
        received=[],
        options={},
        beside=lambda start: start,
        keeper=SnapshotKeeper(tmp_path / "memory", 1 << 20),
    )
    yield supervisor
    supervisor.listener.close()


def client_of(supervisor: HostSupervisor, attempt: int) -> KeeperClient:
    return KeeperClient(KeeperAddress("b", "127.0.0.1", supervisor.listener.port), SECRET, attempt)


def wait_until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_host_that_loses_its_leader_accepts_no_snapshot_of_that_attempt(supervisor):
    leave = threading.Event()

    def lead(connection) -> None:
        connection.receive()
        connection.send(encode_message({"kind": "welcome", "attempt": 4}))
        leave.wait(20)

    leader = Listener("127.0.0.1", SECRET, lead)
    lease = LeaseView(4, "t", supervisor.job, f"127.0.0.1:{leader.port}", "1")
    follower = threading.Thread(target=supervisor._follow, args=(lease,))
    follower.start()
    wait_until(lambda: supervisor.keeper.newest_attempt == 4)  # the host has read the welcome
    client = client_of(supervisor, 4)
    client.write(FILE, b"in time")
    sink = client.create(FILE.replace("00007", "00008"))
    sink.write(b"too late")
    leave.set()
    follower.join(20)
    leader.close()
    assert supervisor.keeper.newest_attempt == 5
    with pytest.raises(OSError, match="attempt 4 is over: this host accepts files of attempt 5"):
        sink.close()
    sink.abort()
    newer = client_of(supervisor, 5)
    assert newer.files() == {FILE: 7}
    newer.write(FILE.replace("00007.a0004", "00009.a0005"), b"of the next attempt")
    client.close()
    newer.close()


def test_host_without_snapshots_ends_the_connection_of_a_rank(supervisor):
    supervisor.keeper = None
    with pytest.raises(OSError, match="host b does not answer"):
        client_of(supervisor, 1).files()
