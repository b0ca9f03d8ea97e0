"""The keeper of a host's memory: files of known names, bounded, written once, fenced, for those with the secret."""

from __future__ import annotations

import errno
import json
import time

import pytest

from meshwright.core.channel import ChannelError, connect
from meshwright.core.store.memory.client import KeeperAddress, KeeperClient
from meshwright.core.store.memory.keeper import MAX_READ_BYTES, FencedAttempt, SnapshotKeeper
from meshwright.core.store.memory.session import CONTENT, encode_hello
from tests.kit.memory_hosts import SECRET, MemoryHosts

FILE = "checkpoints/step-00000007.a0002/rank-00000.shard"
HOSTILE_NAMES = (
    "",
    "/etc/passwd",
    "checkpoints/../../escape",
    "checkpoints/step-00000007.a0002/../../../escape",
    "checkpoints/step-00000007.a0002/.hidden",
    "checkpoints/step-00000007.a0002/a/b",
    "checkpoints/step-00000007.a0002/a\0b",
    "checkpoints/step-00000007.a0002/" + "a" * 300,
    "checkpoints/step-00000007.a0002/rank-00000.shard\n",
    "parts/0123",
    "lock",
)


@pytest.fixture
def hosts(tmp_path):
    hosts = MemoryHosts(tmp_path, "ab", limit=1 << 20)
    yield hosts
    hosts.close()


@pytest.fixture
def client(hosts):
    client = KeeperClient(hosts["b"].address, SECRET, attempt=2)
    yield client
    client.close()


def files_below(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_file_is_complete_or_absent(hosts, client):
    keeper = hosts["b"].keeper
    sink = client.create(FILE)
    sink.write(b"x" * 3000)
    assert client.files() == {}
    sink.close()
    assert client.files() == {FILE: 3000}
    assert client.read(FILE, 2990, 100) == b"x" * 10
    assert files_below(keeper.folder) == {FILE}
    with pytest.raises(FileExistsError):
        client.create(FILE)


def test_file_of_a_connection_that_ends_is_discarded(hosts, client):
    keeper = hosts["b"].keeper
    sink = client.create(FILE)
    sink.write(b"x" * 3000)
    wait_until(lambda: keeper.used == 3000)
    sink.abort()
    wait_until(lambda: not keeper.parts)
    assert (keeper.used, files_below(keeper.folder)) == (0, set())


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_name_that_no_snapshot_has_is_rejected(hosts, client, name):
    for request in (
        lambda: client.create(name),
        lambda: client.read(name, 0, 10),
        lambda: client.request("remove", name=name),
    ):
        with pytest.raises(OSError, match=r"host b: (expected the name|no such file)"):
            request()
    assert files_below(hosts["b"].keeper.folder) == set()
    assert not (hosts["b"].keeper.folder.parent / "escape").exists()


def test_size_of_all_files_is_bounded(hosts, client):
    keeper = hosts["b"].keeper
    sink = client.create(FILE)
    sink.write(b"x" * ((1 << 20) + 1))
    with pytest.raises(OSError, match="host b: the memory for snapshots is full") as raised:
        sink.close()
    assert raised.value.errno == errno.ENOSPC
    sink.abort()
    wait_until(lambda: not keeper.parts)
    assert (keeper.used, files_below(keeper.folder)) == (0, set())


def test_file_written_on_the_own_host_has_the_same_limits(hosts):
    client = KeeperClient(hosts["b"].address, SECRET, attempt=2, is_local=True)
    sink = client.create(FILE)
    with pytest.raises(OSError, match="the memory for snapshots is full"):
        sink.write(b"x")  # 4 MiB are reserved at a time
    sink.abort()
    hosts["b"].keeper.limit = 1 << 23
    sink = client.create(FILE)
    sink.write(b"abc")
    sink.close()
    assert (client.files(), hosts["b"].keeper.used) == ({FILE: 3}, 3)
    assert client.read(FILE, 1, 5) == b"bc"
    client.close()


@pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, -1), (0, MAX_READ_BYTES + 1)])
def test_range_that_is_too_large_is_rejected(client, start, length):
    client.write(FILE, b"abc")
    with pytest.raises(OSError, match="expected a range"):
        client.request("read", name=FILE, start=start, length=length)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        CONTENT + b"without a file",
        json.dumps({"kind": "create"}).encode(),
        json.dumps({"kind": "read", "name": FILE, "start": 0, "length": "1"}).encode(),
        json.dumps({"kind": "close", "size": True}).encode(),
        json.dumps({"kind": "files", "more": 1}).encode(),
    ],
)
def test_request_that_is_not_valid_ends_the_connection(hosts, frame):
    connection = connect(("127.0.0.1", hosts["b"].listener.port), SECRET, 5)
    connection.stream.settimeout(10)
    connection.send(encode_hello(2))
    connection.send(frame)
    with pytest.raises(ChannelError):
        connection.receive()


def test_rank_without_the_secret_gets_nothing(hosts):
    address = hosts["b"].address
    stranger = KeeperClient(KeeperAddress("b", address.address, address.port), b"another secret, as long", 2)
    with pytest.raises(ChannelError):
        stranger.files()
    with pytest.raises(ChannelError):
        stranger.create(FILE)


def test_earlier_attempt_can_neither_complete_nor_remove_a_file(hosts, client):
    keeper = hosts["b"].keeper
    client.write(FILE, b"kept")
    other = FILE.replace("00007", "00009")
    sink = client.create(other)
    sink.write(b"late")
    wait_until(lambda: keeper.used == 8)
    keeper.fence(3)
    with pytest.raises(OSError, match=r"host b: .*attempt 2 is over"):
        sink.close()
    for request in (
        lambda: client.create(other),
        lambda: client.request("remove", name=FILE),
        lambda: client.request("retain", folders=[]),
    ):
        with pytest.raises(OSError, match="attempt 2 is over"):
            request()
    assert client.files() == {FILE: 4}
    assert keeper.used == 4


def test_own_files_of_an_earlier_attempt_are_fenced_as_well(hosts):
    hosts["b"].keeper.limit = 1 << 23
    client = KeeperClient(hosts["b"].address, SECRET, attempt=2, is_local=True)
    sink = client.create(FILE)
    sink.write(b"late")
    hosts["b"].keeper.fence(3)
    with pytest.raises(OSError, match="attempt 2 is over"):
        sink.close()
    assert hosts["b"].keeper.files() == {}


def test_rank_of_a_newer_attempt_fences_earlier_ones(hosts, client):
    client.write(FILE, b"kept")
    newer = KeeperClient(hosts["b"].address, SECRET, attempt=5)
    assert newer.files() == {FILE: 4}
    with pytest.raises(OSError, match="accepts files of attempt 5"):
        client.create(FILE.replace("00007", "00009"))
    newer.close()


def test_rank_writes_no_files_of_another_attempt(client):
    with pytest.raises(OSError, match="a rank of attempt 2 writes no file of attempt 9"):
        client.create(FILE.replace("a0002", "a0009"))


def test_only_the_listed_snapshots_are_retained(hosts, client):
    names = [FILE.replace("00007", f"{step:05d}") for step in (7, 8, 9)]
    for name in names:
        client.write(name, b"abc")
    client.request("retain", folders=[name.rpartition("/")[0] for name in names[1:]])
    keeper = hosts["b"].keeper
    assert set(client.files()) == files_below(keeper.folder) == set(names[1:])
    assert keeper.used == 6
    assert len(list((keeper.folder / "checkpoints").iterdir())) == 2


def test_fence_never_goes_back(tmp_path):
    keeper = SnapshotKeeper(tmp_path, 100)
    keeper.fence(4)
    keeper.fence(2)
    with pytest.raises(FencedAttempt):
        keeper.create(FILE, 2)
